"""Text in, text out, for many callers at once: one thread steps the engine, asyncio waits for it.

Three parties. *Callers* live on event loops, any number of them: they check and encode a request,
submit it, and read their `Generation`. The *engine thread* (`engine_thread`) alone touches the
engine. A small *pool* encodes long texts, so that no event loop waits for a tokenizer.

Nothing is queued per token: the engine thread adds to the request's `Generation` and wakes its
reader, who takes all that has come. A slow reader gets larger pieces and costs no memory.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxinfer.config import EngineConfig
from jaxinfer.engine_thread import EngineThread
from jaxinfer.generation import Generation
from jaxinfer.input_processor import (
    InputProcessor,
    PreparedRequest,
    Prompt,
    default_sampling_params,
)
from jaxinfer.metrics import EngineStats, RequestObserver
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import Pooling
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxinfer.edits import Edit
    from jaxinfer.loading import LoadedModel
    from jaxinfer.request_hooks import HookArguments, ResolvedEdits

# Characters (or token ids) from which encoding leaves the event loop. Empirical: a few thousand
# characters take about a millisecond, a hop to the pool and back a tenth of one.
_LONG = 4096
# Words to be ruled out from which the same holds: each is encoded on its own.
_MANY_WORDS = 16


class AsyncEngine:
    """Serves one model to any number of event loops and threads.

    Ready when constructed; needs no running event loop for that.

    Args:
        loaded: The model, from `jaxinfer.loading.load`. Its engine belongs to this object now.
        observer: Hears of latencies, on the engine thread.

    Example:
        ```python
        engine = AsyncEngine.from_config(EngineConfig())
        async for output in engine.generate("Once upon", SamplingParams(max_tokens=32), delta=True):
            print(output.outputs[0].text, end="", flush=True)
        ```
    """

    def __init__(self, loaded: LoadedModel, *, observer: RequestObserver | None = None):
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.config: EngineConfig = loaded.config
        self.model_name: str = loaded.name
        self.max_model_len: int = loaded.engine.max_model_len
        self.vocab_size: int = loaded.engine.vocab_size
        self._engine = loaded.engine
        self._defaults = default_sampling_params(loaded.generation_config)
        self._inputs = InputProcessor(
            loaded.tokenizer,
            max_model_len=loaded.engine.max_model_len,
            vocab_size=loaded.engine.vocab_size,
            max_logprobs=loaded.config.max_logprobs,
            seed=loaded.config.seed,
        )
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jaxinfer-encode")
        self._thread = EngineThread(
            loaded.engine, observer, watches_hosts=loaded.config.num_hosts > 1
        )
        self._hooking = threading.Lock()
        self._resolved: ResolvedEdits | None = None
        self._thread.start()
        # A daemon thread that is inside the device runtime when Python ends crashes the process.
        atexit.register(self.shutdown)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig | None = None,
        *,
        observer: RequestObserver | None = None,
        progress: bool = True,
    ) -> AsyncEngine:
        """Load the model that `config` names and serve it.

        Raises:
            ConfigError, ModelError, checkpoints.CheckpointError: It cannot be loaded.
        """
        from jaxinfer import loading  # checkpoints and devices: nothing that `__init__` needs

        return cls(loading.load(config or EngineConfig(), progress=progress), observer=observer)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served: neither broken nor shut down."""
        return self._thread.serves

    @property
    def stats(self) -> EngineStats:
        """The engine's counters; to be read, not kept."""
        return self._engine.stats

    @property
    def num_live_requests(self) -> int:
        """Requests accepted and not yet ended."""
        return self._thread.num_live_requests

    @property
    def stalled_s(self) -> float:
        """Seconds since the last sign of progress while there is work; 0 when idle."""
        return self._thread.stalled_s

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's makers recommend."""
        return self._defaults

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        delta: bool = False,
        final_only: bool = False,
        progress: bool = False,
        pooling: Pooling | None = None,
        hooks: HookArguments | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's results as they come; the last has `finished` set.

        Closing the iterator, cancelling the task that waits in it, or an exception in the loop's
        body (once the iterator is closed) aborts the request before the next step.

        Args:
            prompt: Text, token ids, or a mapping with "prompt" and/or "prompt_token_ids".
            params: How to sample; None for the model's defaults.
            request_id: A name unique among live requests; None makes one up.
            priority: Lower runs first under the "priority" policy.
            cache_salt: Prefix pages are shared only among equal salts.
            delta: Each result holds only what is new, and only the samples with something new,
                instead of everything so far.
            final_only: Yield only the last, complete result.
            progress: Also yield, after each step of a prompt, a result without outputs whose
                `num_computed_tokens` tells how far it is.
            pooling: Ask for the prompt's vector, in `embedding`, instead of tokens; see `embed`.
            hooks: What to capture and edit inside the model: `capture`, `positions`, `edits` and
                `capture_to`, as for `LLM.generate`. A sample's captures come with its end.

        Raises:
            InvalidRequestError: The request can never be served; raised before anything is yielded.
            QueueFullError: Too many requests wait.
            EngineDeadError: The engine broke, now or before, or was shut down.
        """
        self._thread.check_serves()
        arrival_time = time.monotonic()
        params = self._defaults if params is None else params
        request_id = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        prepare = partial(
            self._inputs.prepare,
            request_id,
            prompt,
            params,
            # Drawn here: in the pool, the order of arrival would be lost.
            base_seed=self._inputs.base_seed(params) if isinstance(params, SamplingParams) else 0,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
            pooling=pooling,
        )
        long = _is_long(prompt) or _has_many_words(params)
        if hooks:
            # Tracing and checking them may take a second.
            prepared = await self._off_loop(lambda: self._with_hooks(prepare(), hooks))
        else:
            prepared = await self._off_loop(prepare) if long else prepare()
        bell = _Bell(asyncio.get_running_loop(), gone=partial(self.abort, request_id))
        generation = Generation(
            prepared,
            self.tokenizer,
            delta=delta,
            final_only=final_only,
            progress=progress,
            notify=bell.ring,
        )
        self._thread.submit(generation)
        finished = False
        try:
            while not finished:
                output = generation.take()
                if output is None:
                    await bell.wait()
                    continue
                finished = output.finished
                yield output
        finally:
            if not generation.finished:
                self.abort(request_id)

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling = Pooling.LAST,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        hooks: HookArguments | None = None,
    ) -> RequestOutput:
        """Return a result whose `embedding` is float32 [D]: the model's last hidden states, pooled.

        They are what the head turns into logits: after the final norm, and not normalised.

        Args:
            prompt: As for `generate`; any length that `generate` takes.
            pooling: The mean over all tokens, or the state of the last one.
            request_id: As for `generate`.
            priority: As for `generate`.
            cache_salt: As for `generate`.
            hooks: As for `generate`.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError: As `generate`.
        """
        stream = self.generate(
            prompt,
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            final_only=True,
            pooling=pooling,
            hooks=hooks,
        )
        async with aclosing(stream):
            async for output in stream:
                return output
        raise AssertionError("a request ends with a result or an error")

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the model's answer to a conversation; arguments and errors as in `generate`."""
        prompt = await self.chat_prompt(messages, **(chat_template_kwargs or {}))
        stream = self.generate(prompt, params, request_id, **generate_kwargs)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> Prompt:
        """Return a conversation as a prompt for `generate`, made off the event loop.

        Raises:
            InvalidRequestError: There is no chat template, or it cannot render these messages.
        """
        self._thread.check_serves()
        return await self._off_loop(partial(self._inputs.chat_prompt, messages, **template))

    async def encode(self, text: str, **options: Any) -> list[int]:
        """Return the text's token ids; long texts are encoded off the event loop.

        Options are those of `InputProcessor.encode`.

        Raises:
            InvalidRequestError: It is no Unicode text, or far longer than the context.
        """
        encode = partial(self._inputs.encode, text, **options)
        return await self._off_loop(encode) if _is_long(text) else encode()

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its reader gets what there is, finish reason "abort".

        Callable from any thread; an unknown id is no error, for the request may just have ended.
        """
        self._thread.abort(request_id)

    def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, give running ones that long, abort the rest, stop the thread.

        Blocks; on an event loop, call it through `asyncio.to_thread`. A second call is harmless.
        """
        atexit.unregister(self.shutdown)
        self._thread.shutdown(drain_timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_edits(self, edits: Sequence[Edit]) -> None:
        """Refuse edits that do not fit the model.

        Raises:
            InvalidRequestError: Says which, and what there is.
        """
        from jaxinfer.edits import resolve  # needs jax, which the rest does not

        with self._hooking:
            resolve(edits, self._engine.hook_points, self.max_model_len)

    def _with_hooks(self, prepared: PreparedRequest, hooks: HookArguments) -> PreparedRequest:
        # These need jax, which the rest does not.
        from jaxinfer.request_hooks import ResolvedEdits, with_hooks

        with self._hooking:
            if self._resolved is None:
                self._resolved = ResolvedEdits()
            points, most = self._engine.hook_points, self.max_model_len
            (hooked,) = with_hooks([prepared], points, hooks, most, self._resolved)
        return hooked

    async def _off_loop(self, function: Callable[[], Any]) -> Any:
        try:
            future = self._pool.submit(function)
        except RuntimeError:
            self._thread.check_serves()
            raise
        return await asyncio.wrap_future(future)


class _Bell:
    """Wakes one reader on its event loop from another thread. Rings are not counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gone: Callable[[], None]):
        self._loop = loop
        self._gone = gone
        self._event = asyncio.Event()
        self._ringing = False

    def ring(self) -> None:
        """Wake the reader; on the engine thread. If its event loop is gone, so is the reader."""
        if self._ringing:
            return  # the loop has not come round to the last ring: it will see this news with it
        self._ringing = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            self._gone()

    async def wait(self) -> None:
        """Return once it rang since the last `wait`."""
        await self._event.wait()
        self._event.clear()

    def _wake(self) -> None:
        self._ringing = False
        self._event.set()


def _is_long(prompt: Any) -> bool:
    if isinstance(prompt, Mapping):
        return any(_is_long(value) for value in prompt.values() if not isinstance(value, Mapping))
    return hasattr(prompt, "__len__") and len(prompt) > _LONG


def _has_many_words(params: Any) -> bool:
    return len(getattr(params, "bad_words", None) or ()) > _MANY_WORDS
