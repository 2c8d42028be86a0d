"""What is around every request, whatever its route: id, key, CORS, metrics, log line, trace, end.

From outside in: `Envelope` (id, deadline, books), CORS, `Auth`, and then the routes.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server import playground
from jaxinfer.server.access_log import log_exchange
from jaxinfer.server.auth import Auth
from jaxinfer.server.call import choose_request_id
from jaxinfer.server.endpoints import ENDPOINTS, MODEL_PATH
from jaxinfer.server.exchange import Exchange
from jaxinfer.server.http_metrics import HttpMetrics
from jaxinfer.server.state import ServerState

# It runs the model, whatever else it looks like.
GUARDED_INFO = frozenset({"/health/generate"})


def in_envelope(app: ASGIApp, state: ServerState, routes: Iterable[tuple[str, str]]) -> ASGIApp:
    """Return the application with all that is around its routes, given as (method, path)."""
    options = state.options
    keys = options.keys()
    if keys:
        pages = playground.paths() if options.playground else frozenset[str]()
        app = Auth(app, keys, open_paths() | pages)
    if options.allowed_origins:
        # Outside of `Auth`: a browser asks for permission before it sends the key, and a page may
        # read a refusal only if it bears these headers.
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return Envelope(app, state, HttpMetrics(state.registry, routes))


def open_paths() -> frozenset[str]:
    """Return what needs no key: what the server says of itself, outside of the API."""
    return frozenset(
        e.path
        for e in ENDPOINTS
        if e.call is None and not e.path.startswith("/v1") and e.path not in GUARDED_INFO
    )


class Envelope:
    """Gives each response its `X-Request-Id`, each request its deadline and its place in the books.

    Args:
        app: What answers.
        state: The server's.
        metrics: Counts all responses.
    """

    def __init__(self, app: ASGIApp, state: ServerState, metrics: HttpMetrics):
        self._app = app
        self._state = state
        self._metrics = metrics
        self._counted = {e.path for e in ENDPOINTS if e.call is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = choose_request_id(Headers(scope=scope).get("x-request-id"), None)
        state["deadline"] = self._state.deadlines.new()
        exchange = Exchange(scope=scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = state["request_id"]
                if self._state.draining:
                    # The client's next request belongs to another server.
                    headers["Connection"] = "close"
            else:
                exchange.num_bytes += len(message.get("body", b""))
            await send(message)

        counts = exchange.path in self._counted
        self._state.num_in_flight += counts
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._state.num_in_flight -= counts
            self._state.streams.give_back(state)
            self._close(exchange, counts)

    def _close(self, exchange: Exchange, is_call: bool) -> None:
        exchange.finish()
        path = exchange.path
        path = MODEL_PATH if path.startswith(MODEL_PATH.partition("{")[0]) else path
        self._metrics.observe(exchange.method, path, exchange.status, exchange.duration_s)
        if self._state.options.access_log:
            log_exchange(exchange)
        if is_call:
            self._state.tracer.record(exchange)
