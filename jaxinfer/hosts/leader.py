"""The leading process's runner: each device call is told to the others, then made here.

A program that spans hosts waits for all of them, so a host that is lost leaves whoever called it
waiting for ever: neither XLA's collectives on CPUs nor NCCL's come back. All calls are therefore
made by a thread of their own, and who asked for them waits for an answer or for bad news.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from time import monotonic
from typing import Any

import jax
import numpy as np

from jaxinfer.batch import SampledTokens, StepPlan, StepResult
from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequestError
from jaxinfer.hooks import Hooks
from jaxinfer.hosts.channel import Leader
from jaxinfer.hosts.messages import Message
from jaxinfer.model_runner import Hidden, InFlight, ModelRunner
from jaxinfer.sampler import Logprobs
from jaxinfer.sampling_batch import PackedSampling
from jaxinfer.sampling_params import SamplingParams

# How soon bad news are heard; good ones at once.
_LOOK_S = 0.25


class LeadingRunner(ModelRunner):
    """Runs steps on the devices of all hosts.

    Args:
        args: As for `ModelRunner`.
        channel: To the others.
    """

    def __init__(self, *args: Any, channel: Leader):
        self._channel = channel
        self._timeout_s = channel.call_timeout_s
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._call, name="jaxinfer-devices", daemon=True).start()
        super().__init__(*args)

    def fill(self, parameters: Mapping[str, jax.Array]) -> None:
        super().fill(parameters)
        self._channel.wait_ready()

    def warmup(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Wait for all programs: compiling one later would look like a host that hangs."""
        self.finish_warmup(on_progress)
        super().warmup()

    def check(self) -> None:
        """Raise `HostLostError` if a host is missing."""
        self._channel.check()

    def close(self) -> None:
        super().close()
        self._channel.close()
        self._calls.put(None)
        if self._channel.lost is not None:
            # jax would wait at the end for those who never come. Registered last, called first.
            atexit.register(os._exit, 1)

    def forward(self, plan: StepPlan, bucket: int | None = None) -> Hidden:
        return self._guarded(lambda: super(LeadingRunner, self).forward(plan, bucket))

    def sample(
        self, plan: StepPlan, hidden: Hidden, masks: Mapping[str, np.ndarray] | None = None
    ) -> InFlight:
        return self._guarded(lambda: super(LeadingRunner, self).sample(plan, hidden, masks))

    def decode(self, plan: StepPlan) -> InFlight:
        return self._guarded(lambda: super(LeadingRunner, self).decode(plan))

    def fetch(self, plan: StepPlan, step: InFlight) -> StepResult:
        return self._guarded(lambda: super(LeadingRunner, self).fetch(plan, step))

    # The device calls. What a follower makes of these messages stands in `follower`.

    def call_backbone(self, T: int, packed: np.ndarray) -> Hidden:
        self._channel.send(Message("backbone", T, (packed,)))
        return super().call_backbone(T, packed)

    def call_sampler(
        self, B: int, hidden: jax.Array, packed: PackedSampling, page_table: np.ndarray | None
    ) -> SampledTokens:
        arrays = (packed.rows, packed.bias, packed.allowed, page_table)
        self._channel.send(Message("sampler", B, arrays))
        return super().call_sampler(B, hidden, packed, page_table)

    def call_decode(
        self, B: int, packed: np.ndarray, limits: np.ndarray, sampling: PackedSampling
    ) -> InFlight:
        arrays = (packed, limits, sampling.rows, sampling.bias, sampling.allowed)
        self._channel.send(Message("decode", B, arrays))
        return super().call_decode(B, packed, limits, sampling)

    def call_score(
        self, T: int, hidden: jax.Array, indices: np.ndarray, token_ids: np.ndarray
    ) -> Logprobs:
        self._channel.send(Message("score", T, (indices, token_ids)))
        return super().call_score(T, hidden, indices, token_ids)

    def call_pool(self, T: int, hidden: jax.Array, slots: np.ndarray) -> jax.Array:
        self._channel.send(Message("pool", T, (slots,)))
        return super().call_pool(T, hidden, slots)

    def _guarded[Result](self, call: Callable[[], Result]) -> Result:
        """Return what the call returns, unless a host is lost first.

        Raises:
            HostLostError: The devices of some host do not answer.
        """
        self._channel.check()
        future: Future[Result] = Future()
        self._calls.put((future, call))
        deadline = monotonic() + self._timeout_s
        while not wait((future,), _LOOK_S).done:
            self._channel.check()
            if monotonic() > deadline:
                self._channel.lose(f"the devices gave no answer for {self._timeout_s:g} s")
        result = future.result()
        # What was computed while somebody was lost is not to be trusted.
        self._channel.check()
        return result

    def _call(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # raised where it is waited for
                future.set_exception(error)


class LeadingEngine(Engine):
    """An engine that, idle or not, notices a host that is lost."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        hooks: Hooks | None = None,
        **more: Any,
    ) -> None:
        """As `Engine`, without what has programs of its own: the other hosts do not make them.

        Raises:
            InvalidRequestError, QueueFullError: As `Engine`; or there are hooks or processors.
        """
        if hooks is not None:
            raise InvalidRequestError("capture and edits need an engine on one host", "capture")
        if params.processors:
            raise InvalidRequestError(
                "logits processors need an engine on one host", "logits_processors"
            )
        super().add_request(request_id, prompt_token_ids, params, **more)

    def check_integrity(self) -> None:
        """As `Engine`; called now and then while there is nothing to do.

        Raises:
            AssertionError: An invariant broke.
            HostLostError: A host ended or hangs.
        """
        super().check_integrity()
        assert isinstance(self.runner, LeadingRunner)
        self.runner.check()
