"""`POST /v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, cast

from starlette.responses import Response

from jaxinfer.errors import InvalidRequestError
from jaxinfer.server.call import Call
from jaxinfer.server.completions import JSON
from jaxinfer.server.logprobs import prompt_logprobs
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

    async def respond(self) -> Response:
        """Return the answer, whole or as a stream. Errors as for completions."""
        try:
            return await self._respond()
        except InvalidRequestError as error:
            # The client knows the fields by the names that it used.
            if error.param == "prompt":
                raise InvalidRequestError(str(error), "messages") from error
            if error.param == "max_tokens" and self.body.max_completion_tokens is not None:
                name = "max_completion_tokens"
                raise InvalidRequestError(str(error).replace("max_tokens", name), name) from error
            raise

    async def _respond(self) -> Response:
        prompt = await self._encode()
        params = self.body.sampling_params(
            self.model.generation_config, self.engine.config.max_logprobs
        )
        batch = self.batch([prompt], params)
        if self.body.stream:
            return await stream_response(self.receive, self._events(batch))
        choices = await until_disconnect(self.receive, batch.choices())
        answer = ChatCompletion(
            **self.envelope,
            object="chat.completion",
            choices=[self._choice(choice) for choice in choices],
            usage=batch.usage(),
        )
        if self.body.return_token_ids:
            answer.prompt_token_ids = prompt.token_ids
        entries = batch.prompt_logprobs[0]
        if self.body.prompt_logprobs is not None and entries is not None:
            answer.prompt_logprobs = prompt_logprobs(
                prompt.token_ids, entries, self.body.prompt_logprobs
            )
        return Response(answer.model_dump_json(exclude_unset=True), media_type=JSON)

    async def _encode(self) -> EncodedPrompt:
        body = self.body
        rendered = await self.engine.chat_prompt(
            body.messages,
            add_generation_prompt=body.generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            **(body.chat_template_kwargs or {}),
        )
        prompt = cast(dict[str, Any], rendered)
        text, ids = prompt["prompt"], prompt["prompt_token_ids"]
        if body.add_special_tokens:
            ids = await self.engine.encode(text, add_special_tokens=True)
        return EncodedPrompt(token_ids=ids, text=text)

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
        return self.formatter(self.body.top_logprobs).chat(delta.token_ids, delta.logprobs)

    async def _events(self, batch: PromptBatch) -> AsyncGenerator[bytes]:
        async with aclosing(batch.deltas()) as deltas:
            async for delta in deltas:
                for choice in self._chunk_choices(delta):
                    yield event(self._chunk(batch, choice), exclude_unset=True)
        if self.body.include_usage:
            chunk = ChatChunk(
                **self.envelope, object="chat.completion.chunk", choices=[], usage=batch.usage()
            )
            yield event(chunk, exclude_unset=True)

    def _chunk(self, batch: PromptBatch, choice: ChatChunkChoice) -> ChatChunk:
        chunk = ChatChunk(**self.envelope, object="chat.completion.chunk", choices=[choice])
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
