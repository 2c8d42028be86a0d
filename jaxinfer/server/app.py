"""The Starlette application: routes, and request ids and HTTP metrics around them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.errors import EngineDeadError, JaxinferError
from jaxinfer.server.body import parse_json_object, read_json
from jaxinfer.server.call import Call, ServedModel, choose_request_id
from jaxinfer.server.chat import ChatCall
from jaxinfer.server.completions import CompletionCall
from jaxinfer.server.errors import UnavailableError, error_reply, handle_error, invalid_request
from jaxinfer.server.fields import refuse_unsupported
from jaxinfer.server.metrics import CONTENT_TYPE, HttpMetrics, render
from jaxinfer.server.protocol import ChatCompletionRequest, CompletionRequest, RequestFields
from jaxinfer.server.state import Phase, ServerState, package_version

OWNER = "jaxinfer"
# Parsed beside the event loop: it takes longer than a token of somebody else's stream may wait.
LONG_BODY_BYTES = 2**18
MODEL_PATH = "/v1/models/{model:path}"


def create_app(state: ServerState) -> ASGIApp:
    """Return the application; it answers 503 until `state.serve` has been called."""
    endpoints = _Endpoints(state)
    routes = [
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route(MODEL_PATH, endpoints.model, methods=["GET"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/ping", endpoints.health, methods=["GET", "POST"]),
        Route("/version", endpoints.version, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/metrics/", endpoints.metrics, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys(
            (HTTPException, JaxinferError, ClientDisconnect, Exception), handle_error
        ),
    )
    # A redirect from a stray slash would turn a POST into a GET.
    app.router.redirect_slashes = False
    return _Envelope(app, HttpMetrics(state.registry, _methods_and_paths(routes)))


class _Endpoints:
    """The handlers. Errors travel; `errors.handle_error` maps them."""

    def __init__(self, state: ServerState):
        self._state = state

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionCall, CompletionRequest)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatCall, ChatCompletionRequest)

    async def models(self, request: Request) -> Response:
        model, _ = self._state.require_model()
        return JSONResponse({"object": "list", "data": [_model_card(model)]})

    async def model(self, request: Request) -> Response:
        model, _ = self._state.require_model()
        model.check_name(request.path_params["model"])
        return JSONResponse(_model_card(model))

    async def health(self, request: Request) -> Response:
        phase = self._state.phase
        if phase is Phase.OK:
            return JSONResponse({"status": phase.value})
        if phase is Phase.DEAD:
            reply = error_reply(EngineDeadError())
        else:
            what = "Loading model" if phase is Phase.LOADING else "Shutting down"
            reply = error_reply(UnavailableError(what))
        body = {"status": phase.value, **reply.body()}
        return JSONResponse(body, reply.status, dict(reply.headers))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": package_version()})

    async def metrics(self, request: Request) -> Response:
        return Response(render(self._state.registry), media_type=CONTENT_TYPE)

    async def _generate[B: RequestFields](
        self, request: Request, call: type[Call[B]], schema: type[B]
    ) -> Response:
        model, metrics = self._state.require_model()
        raw = await read_json(request, self._state.options.max_body_bytes)
        if len(raw) > LONG_BODY_BYTES:
            fields, body = await asyncio.to_thread(_parse, raw, schema)
        else:
            fields, body = _parse(raw, schema)
        self._state.unknown_fields.note(fields, schema.model_fields)
        model.check_name(body.model)
        request_id = choose_request_id(request.headers.get("x-request-id"), body.request_id)
        request.state.request_id = request_id
        asked: Any = call(
            body=body,
            model=model,
            metrics=metrics,
            receive=request.receive,
            request_id=request_id,
        )
        return await asked.respond()


def _parse[B: RequestFields](raw: bytes, schema: type[B]) -> tuple[dict[str, Any], B]:
    """Return a body's fields as they came and as they are understood."""
    fields = parse_json_object(raw)
    refuse_unsupported(fields, schema.endpoint)
    try:
        return fields, schema.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error) from None


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": OWNER,
        "root": model.name,
        "parent": None,
        "max_model_len": model.engine.max_model_len,
        "permission": [],
    }


def _methods_and_paths(routes: list[Route]) -> list[tuple[str, str]]:
    return [(method, route.path) for route in routes for method in sorted(route.methods or ())]


class _Envelope:
    """Gives each response its `X-Request-Id` and each request its line in the HTTP metrics."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        state = scope.setdefault("state", {})
        state["request_id"] = choose_request_id(Headers(scope=scope).get("x-request-id"), None)
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            path = scope["path"]
            path = MODEL_PATH if path.startswith(MODEL_PATH.partition("{")[0]) else path
            duration_s = time.monotonic() - start
            self._metrics.observe(scope["method"], path, status, duration_s)
