"""The routes without a body: what the server says of itself and its model."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from jaxinfer.errors import EngineDeadError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.call import ServedModel
from jaxinfer.server.errors import UnavailableError, error_reply
from jaxinfer.server.metrics import CONTENT_TYPE, render
from jaxinfer.server.state import Phase, ServerState, package_version

OWNER = "jaxinfer"


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = OWNER
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(BaseModel):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """How the server is; with 503 there is an `error` too."""

    status: str
    time_ms: float | None = None


class Version(BaseModel):
    """The answer of `/version`."""

    version: str


class Load(BaseModel):
    """The answer of `/load`."""

    server_load: int


class Info:
    """The handlers. Errors travel; `errors.handle_error` maps them.

    Args:
        state: Whose.
        document: The OpenAPI document.
        page: The same as HTML.
    """

    def __init__(self, state: ServerState, document: dict[str, Any], page: str):
        self._state = state
        self._document = document
        self._page = page

    async def models(self, request: Request) -> Response:
        model, _ = self._state.require_model()
        return _json(ModelList(data=[_model_card(m) for m in (model, *model.edited.values())]))

    async def model(self, request: Request) -> Response:
        model, _ = self._state.require_model()
        return _json(_model_card(model.named(request.path_params["model"])))

    async def health(self, request: Request) -> Response:
        phase = self._state.phase
        if phase in (Phase.OK, Phase.DEGRADED):
            return JSONResponse({"status": phase.value})
        if phase is Phase.DEAD:
            reply = error_reply(EngineDeadError())
        else:
            what = {
                Phase.LOADING: "Loading model",
                Phase.DRAINING: "Shutting down",
                Phase.STALLED: f"No progress for {self._state.stalled_s:.0f} s",
            }
            reply = error_reply(UnavailableError(what[phase]))
        body = {"status": phase.value, **reply.body()}
        return JSONResponse(body, reply.status, dict(reply.headers))

    async def health_generate(self, request: Request) -> Response:
        """Let the model produce one token, behind whoever waits already."""
        model, _ = self._state.require_model()
        engine, start = model.engine, time.monotonic()
        prompt = [engine.tokenizer.bos_token_id or 0]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        timeout_s = self._state.options.health_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async for _ in engine.generate(prompt, params, final_only=True):
                    pass
        except TimeoutError:
            raise UnavailableError(f"There was no token within {timeout_s:g} s") from None
        time_ms = round(1e3 * (time.monotonic() - start), 3)
        return JSONResponse({"status": Phase.OK.value, "time_ms": time_ms})

    async def version(self, request: Request) -> Response:
        return _json(Version(version=package_version()))

    async def load(self, request: Request) -> Response:
        return _json(Load(server_load=self._state.num_in_flight))

    async def metrics(self, request: Request) -> Response:
        return Response(render(self._state.registry), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(self._page)


def _json(answer: BaseModel) -> Response:
    return JSONResponse(answer.model_dump())


def _model_card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.name,
        created=model.created,
        root=model.parent or model.name,
        parent=model.parent,
        max_model_len=model.engine.max_model_len,
    )
