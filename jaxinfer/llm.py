"""The offline API: `LLM(model).generate(prompts)`.

No server, no event loop, no thread of its own: the caller's thread steps the engine. Names of
arguments and results are vLLM's.
"""

from __future__ import annotations

import difflib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast

from jaxinfer.batch_snapshot import Batch, pack_batch, unpack_batch
from jaxinfer.config import EngineConfig
from jaxinfer.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    SnapshotError,
)
from jaxinfer.generation import Generation, Sample
from jaxinfer.input_processor import (
    InputProcessor,
    Prompt,
    default_sampling_params,
)
from jaxinfer.interrupts import interrupts_between_steps
from jaxinfer.metrics import EngineStats
from jaxinfer.output_processor import OutputProcessor
from jaxinfer.outputs import RequestOutput
from jaxinfer.progress_bar import NoProgressBar, ProgressBar, shows_progress
from jaxinfer.request import FinishReason, Pooling, TokenOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scoring import Scoring
from jaxinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.loading import LoadedModel
    from jaxinfer.request_hooks import HookArguments

type Message = Mapping[str, Any]


class LLM(Scoring):
    """A model in this process. Calls from several threads wait for each other.

    Args:
        model: A GGUF or safetensors file, a folder, a hub id, or None for the embedded default.
        settings: Fields of `EngineConfig`.

    Raises:
        ConfigError, ModelError, checkpoints.CheckpointError: It cannot be loaded.

    Example:
        ```python
        with LLM(max_model_len=2048) as llm:
            for output in llm.generate(["Hello", "Once upon"], SamplingParams(temperature=0.0)):
                print(output.outputs[0].text)
        ```
    """

    def __init__(self, model: str | None = None, **settings: Any):
        config = _config(model, settings)
        from jaxinfer import loading  # checkpoints and devices: nothing that `from_loaded` needs

        self._start(loading.load(config.for_throughput()))

    @classmethod
    def from_loaded(cls, loaded: LoadedModel) -> Self:
        """Return an `LLM` around a loaded model, whose engine belongs to it from now on."""
        llm = cls.__new__(cls)
        llm._start(loaded)
        return llm

    def _start(self, loaded: LoadedModel) -> None:
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.config: EngineConfig = loaded.config
        self.model_name: str = loaded.name
        self._engine = loaded.engine
        self._defaults = default_sampling_params(loaded.generation_config)
        self._inputs = InputProcessor(
            loaded.tokenizer,
            max_model_len=loaded.engine.max_model_len,
            vocab_size=loaded.engine.vocab_size,
            max_logprobs=loaded.config.max_logprobs,
            seed=loaded.config.seed,
        )
        self._outputs = OutputProcessor()
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._unusable = ""  # why, once it is
        # What `generate` is at, and in which thread.
        self._batch: tuple[Batch | None, int] = (None, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    @property
    def stats(self) -> EngineStats:
        """The engine's counters; to be read, not kept."""
        return self.engine.stats

    def finish_warmup(self) -> None:
        """Wait until every program is compiled: calls work before, but some take longer."""
        with self._lock:
            if self._unusable:
                raise EngineDeadError(self._unusable)
            self._engine.finish_warmup()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's makers recommend; used where a call gives no parameters."""
        return self._defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Literal["always"] = True,
        on_step: Callable[[], None] | None = None,
        **hooks: Unpack[HookArguments],
    ) -> list[RequestOutput]:
        """Return one result per prompt, in their order.

        Ctrl-C ends the batch after the step in flight; the next call works.

        Args:
            prompts: One prompt or a list: text, token ids, or a mapping with "prompt" and/or
                "prompt_token_ids".
            sampling_params: For all, or one per prompt; None for the model's defaults.
            use_tqdm: A progress bar for batches, if standard error is a terminal; "always" shows
                it anyway.
            on_step: Called between two steps. It may call `snapshot`, and raise to end the batch.
            hooks: What to capture and edit inside the model, see
                `jaxinfer.request_hooks.HookArguments`.

        Raises:
            InvalidRequestError: A prompt or its parameters cannot be served; the message names its
                index in a list. Nothing was run.
            EngineDeadError: The engine broke, now or before, or was shut down.
        """
        single = _is_single(prompts)
        batch = cast("Sequence[Prompt]", [prompts] if single else list(prompts))
        where = "" if single else "prompts"
        return self._run(batch, sampling_params, where, use_tqdm, hooks, on_step=on_step)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Literal["always"] = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        hooks: HookArguments | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Return the model's answer to one conversation or to each of a list.

        Args:
            messages: A list of messages, or a list of such lists.
            sampling_params: As for `generate`.
            use_tqdm: As for `generate`.
            chat_template_kwargs: For the chat template: `add_generation_prompt`,
                `continue_final_message`, `tools`, and what the template itself understands.
            hooks: What `generate` takes as `capture`, `positions`, `edits` and `capture_to`, as a
                mapping.
            template_kwargs: The same as `chat_template_kwargs`, spelled as arguments.

        Raises:
            InvalidRequestError: As for `generate`, or the chat template refuses the messages.
            EngineDeadError: As for `generate`.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(
            "Sequence[Sequence[Message]]", [messages] if single else list(messages)
        )
        where = "" if single else "messages"
        template = {**(chat_template_kwargs or {}), **template_kwargs}
        prompts = []
        for i, conversation in enumerate(conversations):
            with _naming(where, i):
                prompts.append(self._inputs.chat_prompt(conversation, **template))
        return self._run(prompts, sampling_params, where, use_tqdm, hooks or {})

    @property
    def engine(self) -> Engine:
        """What runs it all, for those who look inside: one thread at a time may call it.

        Raises:
            EngineDeadError: It was shut down.
        """
        if not hasattr(self, "_engine"):
            raise EngineDeadError(self._unusable)
        return self._engine

    @property
    def hook_points(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """What can be captured and edited: name → shape of one token's value, and dtype."""
        points = self.engine.hook_points
        return {name: (x.shape[1:], x.dtype.name) for name, x in points.items()}

    def shutdown(self) -> None:
        """Let go of the engine, and with it of the device's memory. A second call is harmless."""
        with self._lock:
            if hasattr(self, "_engine"):
                self._engine.close()
                del self._engine
            self._unusable = "this LLM was shut down; build a new one"

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        where: str,
        use_tqdm: bool | Literal["always"],
        hooks: HookArguments,
        pooling: Pooling | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[RequestOutput]:
        with self._lock:
            if self._unusable:
                raise EngineDeadError(self._unusable)
            params = self._params_for(prompts, sampling_params)
            requests = []
            for i, prompt in enumerate(prompts):
                with _naming(where, i):
                    name = str(next(self._names))
                    requests.append(self._inputs.prepare(name, prompt, params[i], pooling=pooling))
            if hooks:
                from jaxinfer.request_hooks import with_hooks  # needs jax, which the rest does not

                requests = with_hooks(
                    requests, self._engine.hook_points, hooks, self._engine.max_model_len
                )
            generations = [Generation(r, self.tokenizer, final_only=True) for r in requests]
            waiting = [(i, g, sample) for i, g in enumerate(generations) for sample in g.samples]
            return self._complete(Batch(generations, deque(waiting)), where, use_tqdm, on_step)

    def snapshot(self) -> bytes:
        """Return the batch that `generate` is at, for `restore`: to be called from its `on_step`.

        Holds prompts, parameters, seeds and all tokens so far; no weights and no KV pages.

        Raises:
            InvalidRequestError: No batch is running in this thread.
            SnapshotError: The batch captures or edits inside the model.
            EngineDeadError: As for `generate`.
        """
        batch, thread = self._batch
        if batch is None or thread != threading.get_ident():
            raise InvalidRequestError(
                "snapshot() is of a running batch: call it from the on_step of generate()"
            )
        try:
            self._take_in(self._engine.settle())
            return pack_batch(batch, self._engine.snapshot())
        except SnapshotError:
            raise  # refused before anything was changed
        except Exception as error:
            raise self._broken(error) from error

    def restore(
        self,
        data: bytes,
        *,
        use_tqdm: bool | Literal["always"] = True,
        on_step: Callable[[], None] | None = None,
    ) -> list[RequestOutput]:
        """Finish the batch of a snapshot; return what its `generate` would have returned.

        Args:
            data: From `snapshot`, of an `LLM` with the same model and settings; see
                `Engine.restore`.
            use_tqdm: As for `generate`.
            on_step: As for `generate`.

        Raises:
            SnapshotError: As `Engine.restore`.
            EngineDeadError: As for `generate`.
        """
        with self._lock:
            if self._unusable:
                raise EngineDeadError(self._unusable)
            find = self._engine.runner.processor_named
            batch, engine = unpack_batch(data, self.tokenizer, find)
            self._engine.restore(engine)
            batch = Batch(batch.generations, deque(batch.waiting))
            return self._complete(batch, "", use_tqdm, on_step)

    def _complete(
        self,
        batch: Batch,
        where: str,
        use_tqdm: bool | Literal["always"],
        on_step: Callable[[], None] | None,
    ) -> list[RequestOutput]:
        """Run a batch to its end; abort all of it if that fails."""
        generations = batch.generations
        requests = [generation.prepared for generation in generations]
        bar = ProgressBar if shows_progress(use_tqdm, len(requests)) else NoProgressBar
        try:
            with interrupts_between_steps() as interrupted, bar(requests) as progress:
                self._finish(batch, where, progress, interrupted, on_step or (lambda: None))
        except BaseException:
            self._abort(generations)
            raise
        finally:
            self._batch = (None, 0)
        return [_result(generation) for generation in generations]

    def _outputs_of(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool | Literal["always"],
        pooling: Pooling | None = None,
    ) -> tuple[bool, list[RequestOutput]]:
        single = _is_single(prompts)
        batch = cast("Sequence[Prompt]", [prompts] if single else list(prompts))
        return single, self._run(batch, params, "" if single else "prompts", use_tqdm, {}, pooling)

    @property
    def max_scored_tokens(self) -> int:
        return (self.config.max_model_len or 0) - 1

    def _params_for(
        self,
        prompts: Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self._defaults
        if not isinstance(given, Sequence):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise InvalidRequestError(
                f"expected one SamplingParams for all {len(prompts)} prompts or one for each, got "
                f"{len(given)}",
                "sampling_params",
            )
        return given

    def _finish(
        self,
        batch: Batch,
        where: str,
        progress: NoProgressBar,
        interrupted: threading.Event,
        on_step: Callable[[], None],
    ) -> None:
        """Step until every generation has ended."""
        waiting = cast("deque[tuple[int, Generation, Sample]]", batch.waiting)
        self._batch = (batch, threading.get_ident())
        for generation in batch.generations:
            if not generation.finished:  # as some of a restored batch are
                self._outputs.add(generation)
        while True:
            self._feed(waiting, where)
            if not waiting and not self._engine.has_unfinished():
                break
            try:
                outputs = self._engine.step()
            except Exception as error:
                raise self._broken(error) from error
            progress.update(self._take_in(outputs))
            on_step()
            if interrupted.is_set():
                raise KeyboardInterrupt
        self._check_integrity()

    def _take_in(self, outputs: Iterable[TokenOutput]) -> Sequence[Generation]:
        """Let the requests have what the engine gave them; return those that got something."""
        touched, to_abort = self._outputs.process(outputs)
        for sample_id in to_abort:
            self._engine.abort(sample_id, FinishReason.STOP)
        return touched

    def _feed(self, waiting: deque[tuple[int, Generation, Sample]], where: str) -> None:
        """Hand over as many samples as the engine's queue takes."""
        while waiting:
            index, generation, sample = waiting[0]
            try:
                with _naming(where, index):
                    self._engine.add_request(**generation.prepared.engine_request(sample.index))
            except QueueFullError:
                if not self._engine.has_unfinished():
                    raise
                return
            waiting.popleft()

    def _abort(self, generations: Iterable[Generation]) -> None:
        for generation in generations:
            _, sample_ids = self._outputs.abort(generation.request_id)
            for sample_id in sample_ids:
                if not self._unusable:
                    self._engine.abort(sample_id)
        if not self._unusable and not self._engine.has_unfinished():
            self._check_integrity()

    def _check_integrity(self) -> None:
        try:
            self._engine.check_integrity()
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> EngineDeadError:
        self._unusable = (
            f"the engine broke and serves nothing more ({type(error).__name__}: {error}); "
            "build a new LLM"
        )
        return EngineDeadError(self._unusable)


def _config(model: str | None, settings: Mapping[str, Any]) -> EngineConfig:
    known = EngineConfig.field_names()
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(known)}"
            raise ConfigError(f"LLM has no setting {name!r}: {hint}")
    return EngineConfig(model=model, **settings)


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is one prompt, and not a list of them."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return getattr(prompts, "ndim", 1) == 1
    if not prompts:
        return False
    first = prompts[0]
    return not isinstance(first, str | Mapping | Sequence) and getattr(first, "ndim", 0) == 0


def _result(generation: Generation) -> RequestOutput:
    output = generation.take()
    assert output is not None, f"request {generation.request_id} ended without a result"
    return output


@contextmanager
def _naming(where: str, index: int) -> Generator[None, None, None]:
    """Say of which entry of a list an error speaks."""
    try:
        yield
    except InvalidRequestError as error:
        if not where:
            raise
        raise InvalidRequestError(f"{where}[{index}]: {error}", error.param) from error
