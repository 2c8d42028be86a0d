"""`POST /v1/messages` and `/v1/messages/count_tokens`: a chat in Anthropic's dialect. Text only."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from pydantic import BaseModel
from starlette.responses import Response

from jaxinfer.server.anthropic_body import CountTokensRequest, MessagesRequest
from jaxinfer.server.call import Call
from jaxinfer.server.client_words import client_words
from jaxinfer.server.completions import JSON
from jaxinfer.server.errors import error_reply
from jaxinfer.server.prompt_batch import Delta, EncodedPrompt, PromptBatch
from jaxinfer.server.streaming import Framing, stream_response, until_disconnect
from jaxinfer.server.tokenize import MAX_CHARS

type StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class TextBlock(BaseModel):
    """The only kind of content block."""

    type: Literal["text"] = "text"
    text: str


class MessageUsage(BaseModel):
    """Tokens of one request; `input_tokens` are those that were not found in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class _AnthropicFraming(Framing):
    """Streams of this dialect end with `message_stop` or an error, and not with `[DONE]`."""

    end = b""

    def error(self, error: Exception) -> bytes:
        return _event("error", **error_reply(error).anthropic_body())


FRAMING = _AnthropicFraming()


class CountTokensCall(Call[CountTokensRequest]):
    """One request to `/v1/messages/count_tokens`."""

    schema: ClassVar[type[CountTokensRequest]] = CountTokensRequest

    async def respond(self) -> Response:
        """Return the number of tokens, also of a conversation that is too long to be answered."""
        body = self.body
        prompt = await self.encode_chat(body.conversation, max_chars=MAX_CHARS, **body.template)
        answer = TokenCount(input_tokens=len(prompt.token_ids))
        return Response(answer.model_dump_json(), media_type=JSON)


class MessagesCall(Call[MessagesRequest]):
    """One request to `/v1/messages`."""

    schema: ClassVar[type[MessagesRequest]] = MessagesRequest

    @property
    def response_id(self) -> str:
        return f"msg_{self.request_id}"

    async def respond(self) -> Response:
        """Return the answer, whole or as a stream. Errors: `Call.respond`."""
        body = self.body
        with client_words(prompt="messages", stop="stop_sequences"):
            prompt: EncodedPrompt = await self.encode_chat(body.conversation, **body.template)
            batch = self.batch([prompt], body.sampling_params(self.model.generation_config))
            if body.stream:
                return await stream_response(
                    self.receive,
                    self._events(batch),
                    ping_interval_s=self.ping_interval_s(),
                    framing=FRAMING,
                )
            [choice] = await until_disconnect(self.receive, batch.choices())
        answer = self._message(batch, [TextBlock(text=choice.text)] if choice.text else [], choice)
        return Response(answer.model_dump_json(), media_type=JSON)

    def _message(
        self, batch: PromptBatch, content: list[TextBlock], choice: Delta | None
    ) -> Message:
        reason, sequence = (None, None) if choice is None else _stop(choice)
        return Message(
            id=self.response_id,
            model=self.model.name,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(batch),
        )

    async def _events(self, batch: PromptBatch) -> AsyncGenerator[bytes]:
        begun, opened = False, False
        last: Delta | None = None
        async with aclosing(batch.deltas()) as deltas:
            async for last in deltas:
                if not begun:
                    begun = True
                    message = self._message(batch, [], None).model_dump()
                    yield _event("message_start", message=message)
                if not last.text:
                    continue
                if not opened:
                    opened = True
                    block = {"type": "text", "text": ""}
                    yield _event("content_block_start", index=0, content_block=block)
                delta = {"type": "text_delta", "text": last.text}
                yield _event("content_block_delta", index=0, delta=delta)
        assert last is not None, "a batch has at least one delta"
        if opened:
            yield _event("content_block_stop", index=0)
        reason, sequence = _stop(last)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=_usage(batch).model_dump())
        yield _event("message_stop")


def _stop(choice: Delta) -> tuple[StopReason, str | None]:
    if choice.finish_reason != "stop":
        return "max_tokens", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "end_turn", None


def _usage(batch: PromptBatch) -> MessageUsage:
    usage = batch.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _event(kind: str, **fields: Any) -> bytes:
    fields.setdefault("type", kind)
    data = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
