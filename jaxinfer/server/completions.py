"""`POST /v1/completions`: a batch of prompts in, their continuations out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar

from starlette.responses import Response

from jaxinfer.outputs import Logprob
from jaxinfer.server.call import Call
from jaxinfer.server.client_words import client_words
from jaxinfer.server.logprobs import TextOffsets, choice_formatter, prompt_logprobs
from jaxinfer.server.off_loop import off_loop_if_many
from jaxinfer.server.prompt_batch import Delta, EncodedPrompt, PromptBatch
from jaxinfer.server.protocol import CompletionRequest
from jaxinfer.server.responses import Completion, CompletionChoice, CompletionLogprobs
from jaxinfer.server.streaming import event, stream_response, until_disconnect

JSON = "application/json"


@dataclass(kw_only=True)
class CompletionCall(Call[CompletionRequest]):
    """One request to `/v1/completions`."""

    id_prefix: ClassVar[str] = "cmpl"
    schema: ClassVar[type[CompletionRequest]] = CompletionRequest

    _offsets: dict[int, TextOffsets] = field(default_factory=dict, init=False)

    async def respond(self) -> Response:
        """Return the answer, whole or as a stream. Errors: `Call.respond`."""
        with client_words(max_tokens=self.body.limit_name):
            return await self._respond()

    async def _respond(self) -> Response:
        truncation = self.body.cut_rule(self.engine.max_model_len, self.body.num_reserved_tokens)
        prompts = await self.encode_prompts(
            self.body.prompt,
            add_special_tokens=self.body.add_special_tokens is not False,
            truncation=truncation,
        )
        longest = max(len(prompt.token_ids) for prompt in prompts)
        params = self.body.sampling_params(
            self.model.generation_config,
            self.engine.config.max_logprobs,
            self.engine.max_model_len - longest,
        )
        batch = self.batch(prompts, params)
        if self.body.stream:
            return await stream_response(
                self.receive, self._events(batch), ping_interval_s=self.ping_interval_s()
            )
        choices = await until_disconnect(self.receive, batch.choices())
        return await off_loop_if_many(batch.num_logprobs(choices), self._answer, batch, choices)

    def _answer(self, batch: PromptBatch, choices: Sequence[Delta]) -> Response:
        answer = Completion(
            **self.envelope,
            choices=[self._choice(batch, choice) for choice in choices],
            usage=batch.usage(generated=not self.body.only_echo),
            timings=batch.timings(),
        )
        return Response(answer.model_dump_json(exclude={"prompt_progress"}), media_type=JSON)

    async def _events(self, batch: PromptBatch) -> AsyncGenerator[bytes]:
        generated = not self.body.only_echo
        num_open = batch.num_choices
        async with aclosing(batch.deltas()) as deltas:
            async for delta in deltas:
                if delta.progress is not None:
                    yield _event(
                        Completion(**self.envelope, choices=[], prompt_progress=delta.progress)
                    )
                    continue
                num_open -= delta.finish_reason is not None
                if not self._worth_sending(delta):
                    continue
                chunk = Completion(**self.envelope, choices=[self._choice(batch, delta)])
                if self.body.continuous_usage:
                    chunk.usage = batch.usage(generated=generated)
                if self.body.timings_per_token or not (num_open or self.body.include_usage):
                    chunk.timings = batch.timings()
                yield _event(chunk)
        if self.body.include_usage:
            usage = batch.usage(generated=generated)
            last = Completion(**self.envelope, choices=[], usage=usage, timings=batch.timings())
            yield _event(last)

    def _worth_sending(self, delta: Delta) -> bool:
        """A token whose text is held back says nothing yet, unless it is asked for by id."""
        body = self.body
        return bool(
            delta.text
            or delta.finish_reason
            or (delta.first and body.echo)
            or (delta.token_ids and (body.return_token_ids or body.logprobs is not None))
        )

    def _choice(self, batch: PromptBatch, delta: Delta) -> CompletionChoice:
        """Return a whole choice, or in a stream its new part."""
        body = self.body
        prompt = batch.prompts[delta.prompt_index]
        echo = bool(body.echo) and delta.first
        text, token_ids, entries = delta.text, delta.token_ids, delta.logprobs
        if body.only_echo:
            text, token_ids, entries = "", [], []
        choice = CompletionChoice(
            index=delta.index,
            text=self._prompt_text(prompt) + text if echo else text,
            logprobs=self._logprobs(batch, delta, echo, token_ids, entries),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if body.only_echo and delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = "length", None
        if body.return_token_ids:
            choice.token_ids = token_ids
            if delta.first:
                choice.prompt_token_ids = prompt.token_ids
        asked = batch.prompt_logprobs[delta.prompt_index]
        if body.prompt_logprobs is not None and asked is not None:
            choice.prompt_logprobs = prompt_logprobs(prompt.token_ids, asked, body.prompt_logprobs)
        return choice

    def _logprobs(
        self,
        batch: PromptBatch,
        delta: Delta,
        echo: bool,
        token_ids: Sequence[int],
        entries: Sequence[dict[int, Logprob]],
    ) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        prompt = batch.prompts[delta.prompt_index]
        if delta.index not in self._offsets:
            self._offsets[delta.index] = TextOffsets(
                self.engine.tokenizer,
                skip_special_tokens=batch.params.skip_special_tokens,
                prompt_token_ids=prompt.token_ids,
            )
        of_choice = self._offsets[delta.index]
        all_ids: list[int] = list(token_ids)
        all_entries: list[dict[int, Logprob] | None] = list(entries)
        offsets: list[int] = []
        if echo:
            all_ids = prompt.token_ids + all_ids
            all_entries = (batch.prompt_logprobs[delta.prompt_index] or []) + all_entries
            offsets = of_choice.of_prompt(prompt.token_ids, self._prompt_text(prompt))
        offsets += of_choice.of_output(token_ids)
        formatter = choice_formatter(self.engine, self.body, self.body.logprobs)
        return formatter.completion(all_ids, all_entries, offsets)

    def _prompt_text(self, prompt: EncodedPrompt) -> str:
        if prompt.text is not None and not prompt.truncated:
            return prompt.text
        skip = self.body.skip_special_tokens is not False
        return self.engine.tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)


def _event(chunk: Completion) -> bytes:
    """Return a chunk with all of its fields, as vLLM sends it, but without llama.cpp's if unset."""
    unset = {name for name in ("timings", "prompt_progress") if getattr(chunk, name) is None}
    return event(chunk, exclude=unset)
