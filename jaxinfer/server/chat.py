"""`POST /v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import ClassVar

from starlette.responses import Response

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.call import Call
from jaxinfer.server.client_words import client_words
from jaxinfer.server.completions import JSON
from jaxinfer.server.logprobs import choice_formatter, prompt_logprobs
from jaxinfer.server.off_loop import off_loop_if_many
from jaxinfer.server.prompt_batch import Delta, EncodedPrompt, PromptBatch
from jaxinfer.server.protocol import ChatCompletionRequest
from jaxinfer.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from jaxinfer.server.streaming import event, stream_response, until_disconnect


class ChatCall(Call[ChatCompletionRequest]):
    """One request to `/v1/chat/completions`."""

    id_prefix: ClassVar[str] = "chatcmpl"
    schema: ClassVar[type[ChatCompletionRequest]] = ChatCompletionRequest

    async def respond(self) -> Response:
        """Return the answer, whole or as a stream. Errors: `Call.respond`."""
        with client_words(prompt="messages", max_tokens=self.body.limit_name):
            return await self._respond()

    async def _respond(self) -> Response:
        prompt = await self._prompt()
        params = self._params()
        batch = self.batch([prompt], params)
        if self.body.stream:
            return await stream_response(
                self.receive, self._events(batch), ping_interval_s=self.ping_interval_s()
            )
        choices = await until_disconnect(self.receive, batch.choices())
        return await off_loop_if_many(batch.num_logprobs(choices), self._answer, batch, choices)

    def _answer(self, batch: PromptBatch, choices: Sequence[Delta]) -> Response:
        [prompt] = batch.prompts
        answer = ChatCompletion(
            **self.envelope,
            object="chat.completion",
            choices=[self._choice(choice) for choice in choices],
            usage=batch.usage(),
            timings=batch.timings(),
        )
        if self.body.return_token_ids:
            answer.prompt_token_ids = prompt.token_ids
        entries = batch.prompt_logprobs[0]
        if self.body.prompt_logprobs is not None and entries is not None:
            answer.prompt_logprobs = prompt_logprobs(
                prompt.token_ids, entries, self.body.prompt_logprobs
            )
        return Response(answer.model_dump_json(exclude_unset=True), media_type=JSON)

    async def _prompt(self) -> EncodedPrompt:
        body = self.body
        return await self.encode_chat(
            body.messages,
            truncation=body.cut_rule(self.engine.max_model_len, body.num_reserved_tokens),
            add_special_tokens=bool(body.add_special_tokens),
            add_generation_prompt=body.generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            **self.template_of(body.chat_template),
            **(body.chat_template_kwargs or {}),
        )

    def _params(self) -> SamplingParams:
        return self.body.sampling_params(
            self.model.generation_config, self.engine.config.max_logprobs
        )

    @property
    def _echo(self) -> str:
        """The unfinished assistant message that the answer starts with, if that was asked for."""
        last = self.body.messages[-1]
        return last["content"] if self.body.echo and last["role"] == "assistant" else ""

    def _choice(self, choice: Delta) -> ChatChoice:
        result = ChatChoice(
            index=choice.index,
            message=ChatMessage(role="assistant", content=self._echo + choice.text, refusal=None),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self.body.return_token_ids:
            result.token_ids = choice.token_ids
        return result

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        formatter = choice_formatter(self.engine, self.body, self.body.top_logprobs)
        return formatter.chat(delta.token_ids, delta.logprobs)

    async def _events(self, batch: PromptBatch) -> AsyncGenerator[bytes]:
        num_open = batch.num_choices
        async with aclosing(batch.deltas()) as deltas:
            async for delta in deltas:
                if delta.progress is not None:
                    chunk = self._chunk(batch)
                    chunk.prompt_progress = delta.progress
                    yield event(chunk, exclude_unset=True)
                    continue
                num_open -= delta.finish_reason is not None
                for choice in self._chunk_choices(delta):
                    ends = choice.finish_reason is not None and not num_open
                    chunk = self._chunk(batch, choice)
                    if self.body.timings_per_token or (ends and not self.body.include_usage):
                        chunk.timings = batch.timings()
                    yield event(chunk, exclude_unset=True)
        if self.body.include_usage:
            chunk = self._chunk(batch)
            chunk.usage, chunk.timings = batch.usage(), batch.timings()
            yield event(chunk, exclude_unset=True)

    def _chunk(self, batch: PromptBatch, choice: ChatChunkChoice | None = None) -> ChatChunk:
        choices = [] if choice is None else [choice]
        chunk = ChatChunk(**self.envelope, object="chat.completion.chunk", choices=choices)
        if choice is None:
            return chunk
        if self.body.continuous_usage:
            chunk.usage = batch.usage()
        if self.body.return_token_ids and choice.delta.role is not None:
            chunk.prompt_token_ids = batch.prompts[0].token_ids
        return chunk

    def _chunk_choices(self, delta: Delta) -> list[ChatChunkChoice]:
        """Return the events of one delta: the role first, then text, then the finish reason."""
        parts = []
        if delta.first:
            parts.append(ChatDelta(role="assistant", content=""))
            if self._echo:
                parts.append(ChatDelta(content=self._echo))
        chunks = [
            ChatChunkChoice(index=delta.index, delta=part, finish_reason=None) for part in parts
        ]
        asked_ids = bool(delta.token_ids) and bool(self.body.return_token_ids)
        if delta.text or asked_ids or (delta.token_ids and self.body.logprobs):
            chunk = ChatChunkChoice(
                index=delta.index, delta=ChatDelta(content=delta.text), finish_reason=None
            )
            if self.body.logprobs:
                chunk.logprobs = self._logprobs(delta)
            if asked_ids:
                chunk.token_ids = delta.token_ids
            chunks.append(chunk)
        if delta.finish_reason is not None:
            chunks.append(
                ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )
        return chunks
