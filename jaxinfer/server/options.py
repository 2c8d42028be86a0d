"""Settings of the HTTP side of a server process."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the HTTP side.

    Attributes:
        max_body_bytes: Largest request body; 413 above it.
        drain_timeout_s: How long running requests may go on after a signal to stop.
        sse_ping_interval_s: Silence after which a stream gets a comment, so that no proxy takes
            it for dead; 0 or less for never.
        pooling: How embeddings are made where the request does not say: "last" or "mean".
        trust_request_chat_template: Run the Jinja template that a request brings. It is sandboxed,
            but may take long.
        health_timeout_s: How long `/health/generate` waits for its token.
    """

    max_body_bytes: int = 32 * MIB
    drain_timeout_s: float = 30.0
    sse_ping_interval_s: float = 15.0
    pooling: str = "last"
    trust_request_chat_template: bool = False
    health_timeout_s: float = 20.0
