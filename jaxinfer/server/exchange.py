"""One request and what became of it, as the access log and the traces tell it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

MAX_TARGET_CHARS = 200
_UNPRINTABLE = re.compile(r"[^!-~]")


@dataclass(kw_only=True)
class Exchange:
    """One request and its response so far.

    Attributes:
        scope: The request, as ASGI has it.
        start: `time.monotonic()` seconds at its arrival.
        start_ns: The same as Unix nanoseconds.
        status: Of the response; 499 if the client left before there was one.
        num_bytes: Of the response's body.
        duration_s: Arrival to the end of the response.
    """

    scope: Scope
    start: float = field(default_factory=time.monotonic)
    start_ns: int = field(default_factory=time.time_ns)
    status: int = 500
    num_bytes: int = 0
    duration_s: float = 0.0

    @property
    def method(self) -> str:
        return self.scope["method"]

    @property
    def path(self) -> str:
        return self.scope["path"]

    @property
    def target(self) -> str:
        """The path as it was sent, fit to be logged: clients must not be able to forge lines."""
        raw = self.scope.get("raw_path") or self.path.encode()
        return _UNPRINTABLE.sub("?", raw.decode("latin-1"))[:MAX_TARGET_CHARS]

    @property
    def client(self) -> str:
        """Who asked: address and port, or "unix" behind a Unix socket."""
        client = self.scope.get("client")
        return f"{client[0]}:{client[1]}" if client else "unix"

    @property
    def batch(self) -> Any:
        """The prompts that ran for it, a `PromptBatch`; None for none."""
        return getattr(self.scope["state"].get("call"), "ran", None)

    def finish(self) -> None:
        """Say that the response is over."""
        self.duration_s = time.monotonic() - self.start

    def facts(self) -> dict[str, Any]:
        """Return what a log line says of it. Never what was asked or answered."""
        state = self.scope["state"]
        facts: dict[str, Any] = {
            "request_id": state["request_id"],
            "client": self.client,
            "method": self.method,
            "path": self.target,
            "status": self.status,
            "duration_s": round(self.duration_s, 6),
            "bytes": self.num_bytes,
            "disconnected": bool(state.get("disconnected")),
        }
        call = state.get("call")
        if call is not None:
            facts["stream"] = bool(getattr(call.body, "stream", None))
        if self.batch is not None:
            usage, timings = self.batch.usage(), self.batch.timings()
            facts |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "queue_ms": timings.queue_ms,
                "prefill_ms": timings.prompt_ms,
                "decode_ms": timings.predicted_ms,
            }
        return facts
