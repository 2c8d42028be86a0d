"""Settings of the HTTP side of a server process: one frozen record whose fields are flags too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jaxinfer.errors import ConfigError

MIB = 2**20
KIB = 2**10
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
METRICS_PREFIXES = ("vllm", "jaxinfer")
POOLINGS = ("last", "mean")

_WHOLE = ("max_body_bytes", "max_header_bytes", "max_concurrent_streams")
_SECONDS = (
    "request_timeout_s",
    "receive_timeout_s",
    "send_timeout_s",
    "keep_alive_timeout_s",
    "stall_timeout_s",
    "health_timeout_s",
)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the HTTP side.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        uds: Unix socket to listen on, instead of a port.
        ssl_certfile: Certificate chain (PEM); with it the server speaks TLS only.
        ssl_keyfile: Key of the certificate (PEM), if it is not in the same file.
        ssl_ca_certs: Authorities (PEM); clients have to show a certificate of one of them.
        api_key: A key that clients have to send; several are all valid. The command line shows in
            `ps`: prefer the file or the environment.
        api_key_file: File of such keys, one per line; # starts a comment.
        allowed_origins: Web pages that a browser lets talk to this server; "*" for any.
        allowed_methods: HTTP methods that they may use; "*" for all.
        allowed_headers: Request headers that they may send; "*" for all.
        allow_credentials: Let browsers send cookies and client certificates from those pages.
        max_body_bytes: Largest request body; 413 above it.
        max_header_bytes: Largest request line with headers; 431 above it.
        max_concurrent_streams: Most streams open at once; 429 above it. None for no limit.
        request_timeout_s: Longest time for one request, queueing included; then 504, or an error
            event in a stream. None for no limit.
        receive_timeout_s: Longest wait for a request's headers, and for each next part of its body.
        send_timeout_s: How long a client may leave unread what waits for it.
        keep_alive_timeout_s: How long an idle connection stays open.
        drain_timeout_s: How long running requests may go on after a signal to stop.
        stall_timeout_s: Requests without any progress for that long make `/health` answer 503.
            None for never.
        sse_ping_interval_s: Silence after which a stream gets a comment, so that no proxy takes
            it for dead; 0 or less for never.
        pooling: How embeddings are made where the request does not say: "last" or "mean".
        trust_request_chat_template: Run the Jinja template that a request brings. It is sandboxed,
            but may take long.
        edit: `NAME=FILE`: serve the model under NAME too, changed by the edits of a file that
            `jaxinfer.edit_files.save_edits` wrote.
        health_timeout_s: How long `/health/generate` waits for its token.
        log_level: "debug", "info", "warning" or "error".
        log_format: "text", or "json" for one object per line.
        access_log: Log one line per request. Probes that succeed (`/health`, `/metrics`, …) are
            logged at "debug" only.
        metrics_prefix: "vllm" for vLLM's names in `/metrics`, "jaxinfer" for the same names under
            our own.
        playground: Serve a page for people at `/`: chat, settings, and what the engine does.
        otlp_traces_endpoint: URL to which traces go by OTLP over HTTP; needs jaxinfer[otel].
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    # A record is logged and quoted in tracebacks; keys must not be.
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 32 * MIB
    max_header_bytes: int = 64 * KIB
    max_concurrent_streams: int | None = None
    request_timeout_s: float | None = None
    receive_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    stall_timeout_s: float | None = 120.0
    sse_ping_interval_s: float = 15.0
    pooling: str = "last"
    trust_request_chat_template: bool = False
    edit: tuple[str, ...] = ()
    health_timeout_s: float = 20.0
    log_level: str = "info"
    log_format: str = "text"
    access_log: bool = True
    metrics_prefix: str = "vllm"
    playground: bool = True
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("pooling", POOLINGS),
            ("log_level", LOG_LEVELS),
            ("log_format", LOG_FORMATS),
            ("metrics_prefix", METRICS_PREFIXES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be a whole number ≥ 1, got {value}")
        for name in _SECONDS:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0 seconds, got {value}")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s must be ≥ 0, got {self.drain_timeout_s}")
        if (self.ssl_keyfile or self.ssl_ca_certs) and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile and ssl_ca_certs need ssl_certfile; give it too")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "allow_credentials needs allowed_origins that are named: with * any page could "
                "act as its visitor"
            )
        for key in self.api_key:
            _check_key(key, "api_key")

    def keys(self) -> tuple[str, ...]:
        """Return all keys, those of the file included; none means that no key is needed.

        Raises:
            ConfigError: The file cannot be read or holds no key: a server that was meant to be
                closed must not open because of it.
        """
        if self.api_key_file is None:
            return self.api_key
        where = f"api_key_file {self.api_key_file}"
        try:
            text = Path(self.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}") from None
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        keys = tuple(line for line in lines if line)
        if not keys:
            raise ConfigError(f"{where} holds no key; write one per line")
        for key in keys:
            _check_key(key, where)
        return (*self.api_key, *keys)


def _check_key(key: str, where: str) -> None:
    # What a header can carry; anything else could never match.
    if not key or not key.isascii() or any(c.isspace() or not c.isprintable() for c in key):
        raise ConfigError(f"{where}: a key must be printable ASCII without spaces")
