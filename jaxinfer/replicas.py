"""Several engines behind the face of one: data parallelism in a process.

Each replica is an `AsyncEngine` with weights, cache and thread of its own, on devices of its own.
Nothing is shared but the tokenizer. This file decides who answers, and what it means when one of
them breaks: its requests fail, the others go on. A request that broke a replica is not tried on the
next one, for it might break that as well; its caller may decide to send it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, EngineDeadError, InvalidRequestError, ReplicaDeadError
from jaxinfer.input_processor import InputProcessor, Prompt
from jaxinfer.metrics import EngineStats, RequestObserver, summed
from jaxinfer.outputs import RequestOutput
from jaxinfer.page_pool import extend_hashes
from jaxinfer.prefix_router import PrefixRouter
from jaxinfer.request import Pooling
from jaxinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.edits import Edit
    from jaxinfer.loading import LoadedModel

# Tokens from which hashing leaves the event loop: in pages of 16 that is about half a millisecond.
_LONG = 4096


class Replicas:
    """Serves one model on several groups of devices; has the methods of `AsyncEngine`.

    Args:
        loaded: The same model on each group, from `jaxinfer.loading.load_replicas`.
        observers: Of each replica's latencies.

    Attributes:
        engines: The replicas, in the order of their devices.

    Example:
        ```python
        engine = Replicas.from_config(EngineConfig(data_parallel_size=2))
        async for output in engine.generate("Once upon", SamplingParams(max_tokens=32), delta=True):
            print(output.outputs[0].text, end="", flush=True)
        ```
    """

    def __init__(
        self,
        loaded: Sequence[LoadedModel],
        *,
        observers: Sequence[RequestObserver | None] | None = None,
    ):
        if not loaded:
            raise ConfigError("expected at least one loaded model, got none")
        first = loaded[0]
        self.engines = tuple(
            AsyncEngine(model, observer=observer)
            for model, observer in zip(loaded, observers or [None] * len(loaded), strict=True)
        )
        self.tokenizer = first.tokenizer
        self.config: EngineConfig = dataclasses.replace(
            first.config, data_parallel_size=len(loaded)
        )
        self.model_name: str = first.name
        self.max_model_len: int = first.engine.max_model_len
        self.vocab_size: int = first.engine.vocab_size
        # Only its seeds are used: each replica would draw the same ones.
        self._inputs = InputProcessor(
            first.tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_logprobs=first.config.max_logprobs,
            seed=first.config.seed,
        )
        self._lock = threading.Lock()  # guards what follows
        self._router: PrefixRouter[int] = PrefixRouter(self.config.num_pages or 1)
        self._homes: dict[str, int] = {}
        self._loads = [0] * len(loaded)
        self._closing = False

    @classmethod
    def from_config(
        cls,
        config: EngineConfig | None = None,
        *,
        observers: Sequence[RequestObserver | None] | None = None,
        progress: bool = True,
    ) -> Replicas:
        """Load the model that `config` names, `data_parallel_size` times, and serve it.

        Raises:
            ConfigError, ModelError, checkpoints.CheckpointError: It cannot be loaded.
        """
        from jaxinfer import loading  # checkpoints and devices: nothing that `__init__` needs

        loaded = loading.load_replicas(config or EngineConfig(), progress=progress)
        return cls(loaded, observers=observers)

    @property
    def is_alive(self) -> bool:
        """Whether at least one replica serves requests."""
        return any(engine.is_alive for engine in self.engines)

    @property
    def num_alive(self) -> int:
        """Replicas that serve requests."""
        return sum(engine.is_alive for engine in self.engines)

    @property
    def stats(self) -> EngineStats:
        """The sums of the replicas' counters, as of now."""
        return summed([engine.stats for engine in self.engines])

    @property
    def num_live_requests(self) -> int:
        """Requests accepted and not yet ended."""
        return sum(engine.num_live_requests for engine in self.engines)

    @property
    def stalled_s(self) -> float:
        """As of the replica that has made no progress for longest."""
        return max(engine.stalled_s for engine in self.engines)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's makers recommend."""
        return self.engines[0].get_default_sampling_params()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's results as they come, from the replica that suits it best.

        Arguments and errors are those of `AsyncEngine.generate`, and:

        Raises:
            ReplicaDeadError: The replica that ran it broke; others may be asked.
        """
        prompt, hashes = await self._hashed(prompt, cache_salt)
        params = self._seeded(params)
        with self._placed(request_id, hashes) as (engine, request_id):
            stream = engine.generate(prompt, params, request_id, cache_salt=cache_salt, **options)
            async with aclosing(stream):
                async for output in stream:
                    yield output

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling = Pooling.LAST,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        **options: Any,
    ) -> RequestOutput:
        """Return the prompt's vector; see `AsyncEngine.embed`.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError: As `generate`.
        """
        prompt, hashes = await self._hashed(prompt, cache_salt)
        with self._placed(request_id, hashes) as (engine, request_id):
            return await engine.embed(prompt, pooling, request_id, cache_salt=cache_salt, **options)

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
        async with aclosing(stream):
            async for output in stream:
                yield output

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> Prompt:
        """Return a conversation as a prompt; see `AsyncEngine.chat_prompt`."""
        return await self._any().chat_prompt(messages, **template)

    async def encode(self, text: str, **options: Any) -> list[int]:
        """Return the text's token ids; see `AsyncEngine.encode`."""
        return await self._any().encode(text, **options)

    def check_edits(self, edits: Sequence[Edit]) -> None:
        """Refuse edits that do not fit the model; see `AsyncEngine.check_edits`."""
        self.engines[0].check_edits(edits)

    def abort(self, request_id: str) -> None:
        """End a request before its replica's next step; see `AsyncEngine.abort`."""
        with self._lock:
            home = self._homes.get(request_id)
        if home is not None:
            self.engines[home].abort(request_id)

    def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, give running ones that long, abort the rest, stop all threads."""
        self._closing = True
        deadline = time.monotonic() + drain_timeout_s
        for engine in self.engines:
            engine.shutdown(max(0.0, deadline - time.monotonic()))

    def _any(self) -> AsyncEngine:
        """Return a replica that lives; if there is none, one that will say so."""
        return next((e for e in self.engines if e.is_alive), self.engines[0])

    def _seeded(self, params: SamplingParams | None) -> SamplingParams | None:
        if self.config.seed is None or (params is not None and params.seed is not None):
            return params
        params = self.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            return params  # the replica refuses it
        return dataclasses.replace(params, seed=self._inputs.base_seed(params))

    async def _hashed(self, prompt: Prompt, cache_salt: str) -> tuple[Prompt, list[bytes]]:
        """Return a prompt with its token ids, and the hashes of its full pages."""
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids", prompt.get("prompt"))
            cache_salt = prompt.get("cache_salt") or cache_salt
        if isinstance(ids, str):
            text, ids = ids, await self.encode(ids)
            known = prompt if isinstance(prompt, Mapping) else {}
            prompt = {**known, "prompt": text, "prompt_token_ids": ids}
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or len(ids) >= self.max_model_len:
            return prompt, []  # the replica refuses it
        if len(ids) > _LONG:
            return prompt, await asyncio.to_thread(self._hashes, ids, cache_salt)
        return prompt, self._hashes(ids, cache_salt)

    def _hashes(self, ids: Sequence[Any], cache_salt: Any) -> list[bytes]:
        hashes: list[bytes] = []
        page_size = self.config.page_size
        try:
            # The last token is always computed, as `Scheduler` says.
            num_pages = (len(ids) - 1) // page_size
            extend_hashes(hashes, num_pages, ids, page_size, cache_salt)
        except (TypeError, ValueError, OverflowError, AttributeError):
            return []  # no token ids, or no salt: the replica refuses it
        return hashes

    @contextmanager
    def _placed(
        self, request_id: str | None, hashes: Sequence[bytes]
    ) -> Generator[tuple[AsyncEngine, str]]:
        """Choose a replica and count the request as its own while the block runs."""
        request_id = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        with self._lock:
            if request_id in self._homes:
                raise InvalidRequestError(
                    f"request_id {request_id!r:.80} is in use by a live request; choose another",
                    "request_id",
                )
            loads = {i: self._loads[i] for i, engine in enumerate(self.engines) if engine.is_alive}
            home = self._router.place(hashes, loads) if loads else 0
            self._loads[home] += 1
            self._homes[request_id] = home
        try:
            yield self.engines[home], request_id
        except EngineDeadError as error:
            if self._closing or not self.is_alive:
                raise
            raise ReplicaDeadError(
                f"replica {home} of {len(self.engines)} broke, the others serve on: {error}"
            ) from error
        finally:
            with self._lock:
                self._loads[home] -= 1
                del self._homes[request_id]


type ServingEngine = AsyncEngine | Replicas
"""What a face may stand on."""
