"""The heart: requests in, tokens out, one step at a time. Token ids only; knows nothing of text.

Not thread-safe: one thread calls everything here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxinfer.batch import StepPlan, StepResult
from jaxinfer.compilation import CompileGuard, bucket_of, buckets
from jaxinfer.config import EngineConfig
from jaxinfer.errors import InvalidRequestError, SnapshotError
from jaxinfer.hooks import Hooks
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.metrics import EngineStats
from jaxinfer.page_groups import WindowPool
from jaxinfer.page_pool import PagePool
from jaxinfer.request import FinishReason, Pooling, Request, TokenOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler import Scheduler
from jaxinfer.snapshot import check_made_for, pack, request_of, request_record, unpack
from jaxinfer.step_timer import StepTimer


class Runner[Hidden, InFlight](Protocol):
    """What turns plans into tokens: `jaxinfer.model_runner.ModelRunner`, or a fake in tests."""

    @property
    def num_programs(self) -> int: ...
    @property
    def windows(self) -> tuple[int, ...]: ...
    @property
    def num_programs_pending(self) -> int: ...
    @property
    def hook_points(self) -> Mapping[str, Any]: ...
    def max_decode_steps(self, num_rows: int) -> int: ...
    def decode(self, plan: StepPlan) -> InFlight: ...
    def forward(self, plan: StepPlan) -> Hidden: ...
    def sample(self, plan: StepPlan, hidden: Hidden) -> InFlight: ...
    def fetch(self, plan: StepPlan, step: InFlight) -> StepResult: ...
    @property
    def identity(self) -> Mapping[str, str]: ...
    def register(self, processors: Sequence[LogitsProcessor]) -> None: ...
    def processor_named(self, name: str, leaves: list[Any]) -> LogitsProcessor: ...
    def processor_states(self, request: Request) -> list[list[Any]]: ...
    def restore_states(self, request: Request, states: list[list[Any]]) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def finish_warmup(self) -> None: ...
    def close(self) -> None: ...


class Engine:
    """Continuous batching over one model.

    Args:
        config: Resolved settings: no "auto" and no None where a number is needed.
        runner: Runs the steps.
        vocab_size: Token ids lie in [0, vocab_size).
        eos_token_ids: Tokens that end a sequence unless a request says `ignore_eos`.

    Attributes:
        max_model_len: Longest prompt + output, tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ):
        assert config.num_pages and config.max_model_len, "the config must be resolved"
        self.config = config
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = config.max_model_len
        self.runner = runner
        self.scheduler = Scheduler(
            page_pool=PagePool(config.num_pages, config.page_size, config.enable_prefix_caching),
            window_pools=[
                WindowPool(
                    config.num_window_pages or config.num_pages,
                    config.page_size,
                    config.enable_prefix_caching,
                    window=window,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                )
                for window in runner.windows
            ],
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_mixed_tokens=config.max_num_mixed_tokens,
            policy=config.scheduling_policy,
            max_waiting=config.max_waiting,
        )
        self._guard = CompileGuard()
        most = config.max_num_batched_tokens, config.max_num_seqs
        sizes = [(n,) if config.deterministic else buckets(n) for n in most]
        self._token_buckets, self._row_buckets = sizes
        self._in_flight: tuple[StepPlan, object] | None = None
        self._settled: list[TokenOutput] = []  # learnt between steps, for the next one to return
        self._timer = StepTimer(config.num_decode_steps)
        self._busy_since = 0.0  # when the step in flight had the device for itself
        self._stats = EngineStats(num_pages=self.scheduler.pages.num_pages)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float | None = None,
        pooling: Pooling | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        """Queue a sequence; its tokens come from later `step` calls.

        Args:
            request_id: Not in use by a live request.
            prompt_token_ids: At least one token.
            params: `params.n` must be 1; front ends fan out.
            seed: 64 bits; drawn at random if None and `params.seed` is None.
            priority: Lower runs first under the "priority" policy.
            cache_salt: Prefix pages are shared only among equal salts.
            arrival_time: `time.monotonic()` seconds; now if None.
            pooling: Ask for the prompt's vector instead of tokens: one output without tokens.
            hooks: What to show and to change inside the model: see `jaxinfer.hooks`.

        Raises:
            InvalidRequestError: It could never be served.
            QueueFullError: It could be served, but not now.
        """
        self._check(prompt_token_ids, params, priority)
        if params.processors:
            self.runner.register(params.processors)
        if seed is None:
            seed = params.seed if params.seed is not None else secrets.randbits(64)
        room = self.max_model_len - len(prompt_token_ids)
        if pooling is not None:
            room = 1  # the step that computes the prompt's last token samples behind it
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=seed,
            max_total_tokens=len(prompt_token_ids) + min(params.max_tokens or room, room),
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
            hooks=hooks,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
        )
        self.scheduler.add(request)
        self._stats.prompt_tokens += len(prompt_token_ids)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request without a further output; unknown ids are ignored."""
        if self.scheduler.abort(request_id, reason) is not None:
            self._forget(request_id, reason)

    def warmed_up(self) -> None:
        """Say that nothing is left to be compiled in a step: from here on that is counted.

        Programs that other threads still compile do not count, nor does waiting for one.
        """
        self._guard.reset()

    def finish_warmup(self) -> None:
        """Wait until every program is compiled; to be called before anything is measured."""
        self.runner.finish_warmup()

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_unfinished or self._in_flight is not None or bool(self._settled)

    def step(self) -> list[TokenOutput]:
        """Run one step and return what became known in it, possibly nothing."""
        start, waited_s = time.perf_counter(), self._stats.step_device_s
        outputs, self._settled = self._settled, []
        with self._guard.watching():
            outputs += self._overlapped_step() if self.config.overlap else self._plain_step()
        waited_s = self._stats.step_device_s - waited_s
        self._stats.step_host_s += time.perf_counter() - start - waited_s
        self._account(outputs)
        return outputs

    def _account(self, outputs: Sequence[TokenOutput]) -> None:
        """Count what is handed out, and forget who has ended."""
        for output in outputs:
            self._stats.generation_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                self._forget(output.request_id, output.finish_reason)

    def settle(self) -> list[TokenOutput]:
        """Wait for the step in flight and return what became known, planning no further one."""
        outputs, self._settled = self._settled, []
        outputs += self._learn()
        self._account(outputs)
        return outputs

    def snapshot(self) -> bytes:
        """Return all live requests as bytes, for `restore`; changes nothing for them.

        Waits for the step in flight: its tokens are in the snapshot, and the next `step` returns
        them. Pages are not saved, restored requests compute their tokens again. Bitwise logits are
        those of a preempted request.

        Raises:
            SnapshotError: A live request captures or edits: what it saw so far would be lost.
        """
        hooked = next((r.request_id for r in self.scheduler.live if r.hooks is not None), None)
        if hooked is not None:
            raise SnapshotError(
                f"request {hooked!r} captures or edits inside the model, which a snapshot does not"
                " hold; take it before or after"
            )
        self._settled += self._learn()
        return pack(
            {
                "made_for": self._made_for(),
                "requests": [
                    request_record(request, self.runner.processor_states(request))
                    for request in self.scheduler.live
                ],
            }
        )

    def restore(self, data: bytes) -> dict[str, tuple[int, ...]]:
        """Go on with a snapshot's requests; return each one's output tokens so far.

        `step` returns what comes after those. Requests keep their ids, order, seeds and states.

        Args:
            data: From `snapshot`, of this or another engine with the same model and the same
                settings as far as they decide tokens; pages, batches and devices may differ.

        Raises:
            SnapshotError: It is damaged, of another model or configuration, needs a logits
                processor that is not there, or this engine has live requests.
            InvalidRequestError: A request does not fit this engine's pages.
        """
        if self.has_unfinished():
            raise SnapshotError("a snapshot is restored into an engine without live requests")
        content = unpack(data, "made_for")
        check_made_for(content["made_for"], self._made_for())
        found = [request_of(r, self.runner.processor_named) for r in content["requests"]]
        try:
            for request, states in found:
                self.runner.register(request.params.processors)
                self.scheduler.add(request, resumed=True)
                self.runner.restore_states(request, states)
        except Exception:
            for request in self.scheduler.live:
                self.abort(request.request_id)
            raise
        return {request.request_id: tuple(request.output_token_ids) for request, _ in found}

    def _made_for(self) -> dict[str, Any]:
        """What decides tokens, and must be the same where a snapshot is restored."""
        config = self.config
        return {
            **self.runner.identity,
            "vocab_size": self.vocab_size,
            "eos_token_ids": sorted(self.eos_token_ids),
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "quantization": config.quantization,
            "kernels": config.kernels,
            "max_model_len": config.max_model_len,
        }

    def _plain_step(self) -> list[TokenOutput]:
        """Plan, compute, sample, learn: one step from start to end."""
        plan = self._schedule()
        if not plan:
            return []
        if plan.num_decode_steps > 1:
            self._in_flight = (plan, self.runner.decode(plan))
        else:
            hidden = self.runner.forward(plan)
            self._in_flight = (plan, self.runner.sample(plan, hidden))
        return self._learn()

    def _overlapped_step(self) -> list[TokenOutput]:
        """The same, except that the tokens learnt are those of the step before.

        While the device computes this step, the host waits for the previous one's tokens and deals
        with them. This step's sampling is dispatched after that, when all earlier tokens are known.

        Nothing is planned behind several decode steps in flight. They have spread the host's work
        over many tokens already; planning on would make newcomers wait for twice as many.
        """
        outputs: list[TokenOutput] = []
        if self._in_flight is not None and self._in_flight[0].num_decode_steps > 1:
            outputs = self._learn()
        plan = self._schedule()
        if plan.num_decode_steps > 1:
            sampled = self.runner.decode(plan)
            outputs += self._learn()
        else:
            hidden = self.runner.forward(plan) if plan else None
            outputs += self._learn()
            sampled = self.runner.sample(plan, hidden) if plan else None
        if plan:
            self._in_flight = (plan, sampled)
        return outputs

    def _schedule(self) -> StepPlan:
        scheduler = self.scheduler
        if self._in_flight is None:
            self._busy_since = time.monotonic()
        num_steps = self._timer.max_steps(scheduler.num_running)
        if num_steps > 1:
            num_steps = min(num_steps, self.runner.max_decode_steps(scheduler.num_running))
        plan = scheduler.schedule(num_steps)
        self._stats.num_steps += bool(plan)
        self._stats.num_multi_steps += plan.num_decode_steps > 1
        return plan

    def _learn(self) -> list[TokenOutput]:
        if self._in_flight is None:
            return []
        plan, sampled = self._in_flight
        self._in_flight = None
        result = self._fetch(plan, sampled)
        now = time.monotonic()
        if plan.num_decode_rows == len(plan.rows):
            num_steps = max(map(len, result.token_ids), default=1)
            self._timer.timed(len(plan.rows), (now - self._busy_since) / max(num_steps, 1))
        self._busy_since = now
        return self.scheduler.update(plan, result)

    def _fetch(self, plan: StepPlan, sampled: object) -> StepResult:
        """Wait for the device, and keep the books of the step."""
        start = time.perf_counter()
        result = self.runner.fetch(plan, sampled)
        self._stats.step_device_s += time.perf_counter() - start
        self._count(plan, result)
        return result

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        num_rows = len(plan.sampling_rows)
        B = bucket_of(num_rows, self._row_buckets) if num_rows else 0
        if plan.num_decode_steps == 1:
            T = bucket_of(plan.num_tokens, self._token_buckets)
            self._stats.count_step(plan.num_tokens, T, num_rows, B)
            return
        for step in range(max(map(len, result.token_ids), default=0)):
            alive = sum(len(token_ids) > step for token_ids in result.token_ids)
            self._stats.count_step(alive, B, alive, B)

    @property
    def hook_points(self) -> Mapping[str, Any]:
        """What requests may capture and edit: name → shape [T, ...] and dtype."""
        return self.runner.hook_points

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        scheduler, stats = self.scheduler, self._stats
        pages = scheduler.pages
        stats.num_requests_running = scheduler.num_running
        stats.num_requests_waiting = scheduler.num_waiting
        stats.kv_cache_usage = pages.usage
        stats.num_pages_used = pages.num_used
        stats.num_pages_cached = pages.num_cached
        stats.num_preemptions = scheduler.num_preemptions
        stats.prefix_cache_queries = scheduler.num_prefix_queries
        stats.prefix_cache_hits = scheduler.num_prefix_hits
        stats.num_corrupted_requests = scheduler.num_corrupted
        stats.compilations_total = self.runner.num_programs
        stats.compilations_pending = self.runner.num_programs_pending
        stats.compilations_after_warmup = self._guard.count
        return stats

    def num_computed_tokens(self, request_id: str) -> int | None:
        """Return how far a live request has come, prompt tokens included; None if it is not live.

        Tokens of the step in flight count.
        """
        return self.scheduler.num_computed_tokens(request_id)

    def check_integrity(self) -> None:
        """Assert that no page is lost and no request forgotten.

        Raises:
            AssertionError: An invariant broke; the engine must not go on.
        """
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Stop listening for compilations, and compile nothing more in advance."""
        self.runner.close()
        self._guard.close()

    def _forget(self, request_id: str, reason: FinishReason) -> None:
        self.runner.forget(request_id)
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    def _check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, priority: int
    ) -> None:
        if not len(prompt_token_ids):
            raise InvalidRequestError("prompt must hold at least one token", "prompt")
        if len(prompt_token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"prompt has {len(prompt_token_ids)} tokens; the context length is "
                f"{self.max_model_len}, of which at least one must be left for the output",
                "prompt",
            )
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidRequestError(
                f"prompt: token id {low if low < 0 else high} is outside the vocabulary of "
                f"{self.vocab_size}",
                "prompt",
            )
        params.check_vocab(self.vocab_size)
        if params.n != 1:
            raise InvalidRequestError(f"the engine runs one sample a request, got {params.n}", "n")
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self.config.max_logprobs:
                raise InvalidRequestError(
                    f"{name} must not exceed {self.config.max_logprobs}, got {asked}", name
                )
        if priority and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                'priority needs the scheduling policy "priority" (--scheduling-policy)', "priority"
            )
