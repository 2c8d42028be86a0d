"""`POST /v1/chat/completions/render`: what a chat request would run, without running it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.responses import Response

from jaxinfer.server.chat import ChatCall
from jaxinfer.server.completions import JSON
from jaxinfer.server.protocol import RenderRequest


class RenderedChat(BaseModel):
    """The answer of `/v1/chat/completions/render`.

    Attributes:
        request_id: The client's or a made-up one.
        model: Who would answer.
        prompt: What the chat template wrote.
        token_ids: What would run, cut if the request allows it.
        sampling_params: Its parameters, with the model's and the server's defaults filled in.
    """

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    sampling_params: dict[str, Any]


class RenderCall(ChatCall):
    """One request to `/v1/chat/completions/render`."""

    schema: ClassVar[type[RenderRequest]] = RenderRequest

    async def _respond(self) -> Response:
        prompt = await self._prompt()
        params = self._params()
        answer = RenderedChat(
            request_id=self.request_id,
            model=self.model.name,
            prompt=prompt.text or "",
            token_ids=prompt.token_ids,
            sampling_params=dataclasses.asdict(params),
        )
        return Response(answer.model_dump_json(), media_type=JSON)
