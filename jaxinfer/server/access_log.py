"""What is logged, one line per request and the rest, as text or as JSON objects."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from jaxinfer.server.exchange import Exchange

access_logger = logging.getLogger("jaxinfer.access")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What monitors ask for every few seconds; it would drown the rest.
PROBES = frozenset({"/health", "/ping", "/metrics", "/metrics/", "/load", "/version"})


def configure_logging(level: str, log_format: str) -> None:
    """Send all logs of this process to stderr, in this format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # uvicorn's own "running on" line comes before the model is ready, and would mislead; its
    # warnings are one per malformed request, which anybody can send.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; whatever the message holds, it is one."""
        seconds = time.gmtime(record.created)
        entry: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', seconds)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_exchange(exchange: Exchange) -> None:
    """Write a request's line."""
    is_quiet = exchange.path in PROBES and exchange.status < 400
    level = logging.DEBUG if is_quiet else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    fields = exchange.facts()
    what = f"{exchange.client} {exchange.method} {exchange.target} {exchange.status}"
    rest = {k: v for k, v in fields.items() if k not in _IN_THE_TEXT and v not in (None, False)}
    message = " ".join(
        [what, f"{exchange.duration_s:.3f}s", *(f"{k}={v}" for k, v in rest.items())]
    )
    access_logger.log(level, "%s", message, extra={"fields": fields})


_IN_THE_TEXT = ("client", "method", "path", "status", "duration_s")
