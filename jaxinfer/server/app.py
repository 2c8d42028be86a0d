"""The Starlette application: routes, and from a request to the call that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxinfer.errors import InvalidRequestError, JaxinferError
from jaxinfer.server import playground
from jaxinfer.server.body import parse_json_object, read_json
from jaxinfer.server.body_fields import RequestBody
from jaxinfer.server.call import Call, choose_request_id
from jaxinfer.server.client_words import renamed
from jaxinfer.server.docs_page import page
from jaxinfer.server.endpoints import ENDPOINTS, Endpoint
from jaxinfer.server.envelope import in_envelope
from jaxinfer.server.errors import handle_error, invalid_request
from jaxinfer.server.field_table import FATES
from jaxinfer.server.fields import translate
from jaxinfer.server.info import Info
from jaxinfer.server.limits import hold_deadline
from jaxinfer.server.openapi import document
from jaxinfer.server.state import ServerState, package_version

# Parsed beside the event loop: it takes longer than a token of somebody else's stream may wait.
LONG_BODY_BYTES = 2**18


def create_app(state: ServerState) -> ASGIApp:
    """Return the application; it answers 503 until `state.serve` has been called."""
    described = document(ENDPOINTS, package_version())
    info = Info(state, described, page(ENDPOINTS, package_version()))
    routes = [
        Route(endpoint.path, _handler(state, info, endpoint), methods=[*endpoint.methods])
        for endpoint in ENDPOINTS
    ]
    if state.options.playground:
        routes += playground.routes()
    app = Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys(
            (HTTPException, JaxinferError, ClientDisconnect, Exception), handle_error
        ),
    )
    # A redirect from a stray slash would turn a POST into a GET.
    app.router.redirect_slashes = False
    return in_envelope(app, state, _methods_and_paths(routes))


def _handler(
    state: ServerState, info: Info, endpoint: Endpoint
) -> Callable[[Request], Awaitable[Response]]:
    if endpoint.call is None:
        return getattr(info, endpoint.handler)

    # Starlette tells a function from an ASGI application by its kind, and misses partials.
    async def handle(request: Request) -> Response:
        assert endpoint.call is not None
        async with hold_deadline(request.scope["state"]):
            return await _answer(state, endpoint.call, request)

    return handle


async def _answer(state: ServerState, call: type[Call], request: Request) -> Response:
    """Read, check and answer a request with a body. Errors travel to `errors.handle_error`."""
    model, metrics = state.require_model()
    raw = await read_json(request, state.options.max_body_bytes)
    parse = partial(_parse, raw, call.schema)
    if len(raw) > LONG_BODY_BYTES:
        # One at a time: each may take a hundred megabytes for a while.
        async with state.long_bodies:
            names, body, spelled = await asyncio.to_thread(parse)
    else:
        names, body, spelled = parse()
    del raw, parse
    state.unknown_fields.note(names, FATES[call.schema.endpoint])
    model = model.named(body.model)
    state.streams.take(body, request.state)
    request_id = choose_request_id(request.headers.get("x-request-id"), body.request_id)
    request.state.request_id = request_id
    asked: Call[Any] = call(
        body=body,
        model=model,
        metrics=metrics,
        options=state.options,
        receive=request.receive,
        request_id=request_id,
    )
    request.state.call = asked
    try:
        return await asked.respond()
    except InvalidRequestError as error:
        raise renamed(error, spelled) from None


def _parse(raw: bytes, schema: type[RequestBody]) -> tuple[list[str], RequestBody, dict[str, str]]:
    """Return a body's fields by name, as they are understood, and what stands for what."""
    fields = parse_json_object(raw)
    translated, spelled = translate(fields, FATES[schema.endpoint])
    try:
        return list(fields), schema.model_validate(translated), spelled
    except ValidationError as error:
        raise renamed(invalid_request(error), spelled) from None


def _methods_and_paths(routes: list[Route]) -> list[tuple[str, str]]:
    return [(method, route.path) for route in routes for method in sorted(route.methods or ())]
