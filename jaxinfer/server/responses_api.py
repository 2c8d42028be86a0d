"""`POST /v1/responses`: OpenAI's newer dialect of a chat, whole or as numbered, named events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.responses import Response

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.call import Call
from jaxinfer.server.client_words import client_words
from jaxinfer.server.completions import JSON
from jaxinfer.server.errors import error_reply
from jaxinfer.server.logprobs import LogprobFormatter
from jaxinfer.server.prompt_batch import Delta, EncodedPrompt, PromptBatch
from jaxinfer.server.response_object import (
    ErrorEvent,
    IncompleteDetails,
    InputDetails,
    ItemEvent,
    LifeEvent,
    OutputDetails,
    OutputMessage,
    OutputText,
    PartEvent,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    TextDeltaEvent,
    TextDoneEvent,
)
from jaxinfer.server.responses import TokenLogprob
from jaxinfer.server.responses_body import ResponseRequest
from jaxinfer.server.streaming import Framing, event, stream_response, until_disconnect


@dataclass(kw_only=True)
class ResponseCall(Call[ResponseRequest]):
    """One request to `/v1/responses`."""

    id_prefix: ClassVar[str] = "resp"
    schema: ClassVar[type[ResponseRequest]] = ResponseRequest

    _num_events: int = field(default=0, init=False)

    @property
    def response_id(self) -> str:
        return f"resp_{self.request_id}"

    @property
    def _item_id(self) -> str:
        return f"msg_{self.request_id}"

    async def respond(self) -> Response:
        """Return the answer, whole or as a stream. Errors: `Call.respond`."""
        with client_words(prompt="input", messages="input", max_tokens="max_output_tokens"):
            return await self._respond()

    async def _respond(self) -> Response:
        body = self.body
        prompt: EncodedPrompt = await self.encode_chat(
            body.messages,
            truncation=body.truncation_rule(self.engine.max_model_len),
            **(body.chat_template_kwargs or {}),
        )
        params = body.sampling_params(self.model.generation_config, self.engine.config.max_logprobs)
        batch = self.batch([prompt], params)
        if body.stream:
            return await stream_response(
                self.receive,
                self._events(batch),
                ping_interval_s=self.ping_interval_s(),
                framing=_ResponseFraming(self),
            )
        [choice] = await until_disconnect(self.receive, batch.choices())
        answer = self._object(batch, choice)
        return Response(answer.model_dump_json(), media_type=JSON)

    def _object(self, batch: PromptBatch, choice: Delta | None) -> ResponseObject:
        """Return the answer as it stands: without a choice, it has only begun."""
        if choice is None:
            return ResponseObject(status="in_progress", output=[], **self._echoed(batch.params))
        incomplete = choice.finish_reason != "stop"
        status: Any = "incomplete" if incomplete else "completed"
        usage = batch.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return ResponseObject(
            status=status,
            completed_at=None if incomplete else int(time.time()),
            incomplete_details=(
                IncompleteDetails(reason="max_output_tokens") if incomplete else None
            ),
            output=[self._message(status, [self._part(choice)])],
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputDetails(cached_tokens=cached),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputDetails(),
                total_tokens=usage.total_tokens,
            ),
            timings=batch.timings(),
            **self._echoed(batch.params),
        )

    def _echoed(self, params: SamplingParams) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.response_id,
            "created_at": self.created,
            "model": self.model.name,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }

    def _message(self, status: Any, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=content)

    def _part(self, choice: Delta) -> OutputText:
        return OutputText(text=choice.text, logprobs=self._logprobs(choice))

    def _logprobs(self, delta: Delta) -> list[TokenLogprob]:
        if self.body.num_logprobs is None:
            return []
        formatter = LogprobFormatter(self.engine.tokenizer, num_top=self.body.num_logprobs)
        return formatter.chat(delta.token_ids, delta.logprobs).content

    async def _events(self, batch: PromptBatch) -> AsyncGenerator[bytes]:
        whole: Delta | None = None
        async with aclosing(batch.deltas()) as deltas:
            async for delta in deltas:
                # Their text grows in `whole`, which is not to grow with this one's.
                text, logprobs = delta.text, self._logprobs(delta)
                if whole is None:
                    whole = delta
                    for begin in self._beginning(batch):
                        yield begin
                else:
                    whole.extend(delta)
                if text or logprobs:
                    yield self._event(
                        TextDeltaEvent, item_id=self._item_id, delta=text, logprobs=logprobs
                    )
        assert whole is not None, "a batch has at least one delta"
        for end in self._end(batch, whole):
            yield end

    def _beginning(self, batch: PromptBatch) -> list[bytes]:
        begun = self._object(batch, None)
        return [
            self._event(LifeEvent, "response.created", response=begun),
            self._event(LifeEvent, "response.in_progress", response=begun),
            self._event(
                ItemEvent, "response.output_item.added", item=self._message("in_progress", [])
            ),
            self._event(
                PartEvent,
                "response.content_part.added",
                item_id=self._item_id,
                part=OutputText(text=""),
            ),
        ]

    def _end(self, batch: PromptBatch, whole: Delta) -> list[bytes]:
        answer = self._object(batch, whole)
        [item] = answer.output
        [part] = item.content
        return [
            self._event(
                TextDoneEvent, item_id=self._item_id, text=part.text, logprobs=part.logprobs
            ),
            self._event(PartEvent, "response.content_part.done", item_id=self._item_id, part=part),
            self._event(ItemEvent, "response.output_item.done", item=item),
            self._event(LifeEvent, f"response.{answer.status}", response=answer),
        ]

    def _event(self, kind: type[ResponseEvent], name: str | None = None, **fields: Any) -> bytes:
        if name is not None:
            fields["type"] = name
        made = kind(sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event(made, name=made.type)

    def error_event(self, error: Exception) -> bytes:
        """Return the event that ends a stream early."""
        reply = error_reply(error)
        kind = "server_error" if reply.status >= 500 else "invalid_prompt"
        return self._event(ErrorEvent, code=kind, message=reply.message, param=reply.param)


class _ResponseFraming(Framing):
    """Streams of this dialect end with an event that says how, and not with `[DONE]`."""

    end = b""

    def __init__(self, call: ResponseCall):
        self._call = call

    def error(self, error: Exception) -> bytes:
        return self._call.error_event(error)
