"""The prompts of one HTTP request, run together: many engine streams in, one stream of deltas out.

Both ways of answering read the same deltas, streamed or collected, so that a streamed text and a
non-streamed one are equal by construction.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxinfer.outputs import CompletionOutput, Logprob, RequestOutput
from jaxinfer.replicas import ServingEngine
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import GenerationFailedError
from jaxinfer.server.responses import PromptProgress, PromptTokensDetails, Timings, Usage
from jaxinfer.server.timings import request_progress, request_timings

if TYPE_CHECKING:
    from jaxinfer.request_hooks import HookArguments


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the engine runs it, with its text if the caller sent text.

    Attributes:
        token_ids: What runs.
        text: As the caller sent it, or as the chat template wrote it.
        truncated: Whether it was cut; None if that was not allowed.
    """

    token_ids: list[int]
    text: str | None = None
    truncated: bool | None = None

    def for_engine(self) -> dict[str, Any]:
        """Return what `AsyncEngine.generate` takes."""
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


@dataclass(kw_only=True)
class Delta:
    """What is new of one sample.

    Attributes:
        index: Of the choice: `prompt_index * n + sample`.
        prompt_index: Which prompt.
        first: Whether it is the first of its choice.
        text: New text.
        token_ids: New tokens; longer than the text while a character or stop string is incomplete.
        logprobs: Per new token, if asked for.
        finish_reason: On the last delta of the choice.
        stop_reason: The stop string or token id that ended it.
        progress: How far the prompt is; then it is all that the delta tells.
    """

    index: int
    prompt_index: int
    first: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    progress: PromptProgress | None = None

    def extend(self, newer: Delta) -> None:
        """Take in the next delta of the same choice."""
        self.text += newer.text
        self.token_ids += newer.token_ids
        self.logprobs += newer.logprobs
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason


class PromptBatch:
    """The prompts of one HTTP request.

    Args:
        engine: Runs them.
        prompts: At least one.
        params: The same for all.
        response_id: Names the engine's requests, for its log.
        priority: Lower runs first under the "priority" policy.
        cache_salt: Prefix pages are shared only among equal salts.
        progress: Tell of long prompts while they are computed.
        hooks: What changes the model for them, as for `AsyncEngine.generate`.

    Attributes:
        prompt_logprobs: Per prompt, known before its first delta if asked for.
    """

    def __init__(
        self,
        engine: ServingEngine,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        *,
        response_id: str,
        priority: int = 0,
        cache_salt: str = "",
        progress: bool = False,
        hooks: HookArguments | None = None,
    ):
        self.prompts = prompts
        self.params = params
        self.prompt_logprobs: list[list[dict[int, Logprob] | None] | None] = [None] * len(prompts)
        self._engine = engine
        # Two live requests may bear the same client-given id; the engine's ids differ.
        self._id = f"{response_id}-{uuid.uuid4().hex[:8]}"
        self._priority = priority
        self._cache_salt = cache_salt
        self._progress = progress
        self._hooks = hooks
        self._latest: dict[int, RequestOutput] = {}
        self._num_generation_tokens = 0
        self._num_cached_tokens = [0] * len(prompts)
        self._started: set[int] = set()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def usage(self, *, generated: bool = True) -> Usage:
        """Return the tokens so far. `generated=False` leaves out output that is not returned."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_generated = self._num_generation_tokens if generated else 0
        allowed = [p.truncated for p in self.prompts if p.truncated is not None]
        details = PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens))
        if allowed:
            details.truncated = any(allowed)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=details,
        )

    def timings(self) -> Timings:
        """Return where the time went so far, in llama.cpp's words."""
        return request_timings(self._latest.values(), self._num_generation_tokens)

    def num_logprobs(self, choices: Sequence[Delta]) -> int:
        """Return how many log-probabilities an answer with these choices may show."""
        positions = sum(len(entries or ()) for entries in self.prompt_logprobs)
        positions += sum(len(choice.logprobs) for choice in choices)
        return positions * (1 + max(0, self.params.num_logprobs))

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield what is new, of whichever choice, until all have ended.

        Closing it aborts what still runs.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError: As `AsyncEngine.generate`.
            GenerationFailedError: The engine gave up a sample.
        """
        streams = [self._run(i) for i in range(len(self.prompts))]
        async with aclosing(_merge(streams)) as merged:
            async for delta in merged:
                yield delta

    async def choices(self) -> list[Delta]:
        """Return each choice complete, by index. Errors as in `deltas`."""
        whole: dict[int, Delta] = {}
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                if delta.progress is not None:
                    continue
                if delta.index in whole:
                    whole[delta.index].extend(delta)
                else:
                    whole[delta.index] = delta
        return [whole[i] for i in sorted(whole)]

    async def _run(self, prompt_index: int) -> AsyncGenerator[Delta]:
        stream = self._engine.generate(
            self.prompts[prompt_index].for_engine(),
            self.params,
            f"{self._id}-{prompt_index}",
            priority=self._priority,
            cache_salt=self._cache_salt,
            delta=True,
            progress=self._progress,
            hooks=self._hooks,
        )
        # Sample 0 brings the prompt's log-probabilities; another sample may be faster.
        waits = self.params.prompt_logprobs is not None
        held: list[Delta] = []
        async with aclosing(stream):
            async for output in stream:
                self._latest[prompt_index] = output
                if output.num_computed_tokens is not None:
                    progress = request_progress(output)
                    yield Delta(index=0, prompt_index=prompt_index, progress=progress)
                    continue
                self._num_cached_tokens[prompt_index] = output.num_cached_tokens
                held += [self._delta(prompt_index, sample) for sample in output.outputs]
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs[prompt_index] = output.prompt_logprobs
                    waits = False
                if waits and not output.finished:
                    continue
                for delta in held:
                    yield delta
                held = []

    def _delta(self, prompt_index: int, sample: CompletionOutput) -> Delta:
        if sample.finish_reason == "error":
            raise GenerationFailedError(sample.error or "The engine gave up this request")
        index = prompt_index * self.params.n + sample.index
        first = index not in self._started
        self._started.add(index)
        self._num_generation_tokens += len(sample.token_ids)
        return Delta(
            index=index,
            prompt_index=prompt_index,
            first=first,
            text=sample.text,
            token_ids=list(sample.token_ids),
            logprobs=list(sample.logprobs or ()),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )


async def _merge(streams: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """Yield from all streams as items come; the first error ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    # Small: a slow reader must hold up the pumps, the engine's own streams lose nothing by it.
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    stream: AsyncGenerator[Delta], queue: asyncio.Queue[Delta | Exception | None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put(item)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
