"""A model whose memory is real and whose mind is a hash: `FakeRunner` runs plans without jax.

It has two layers and a paged cache. As in a transformer, each layer writes the states of all
scheduled tokens into their slots, then reads the whole history of each row back through the row's
page table. The next token is a hash of that history, of the seed and of the position. A page that
is shared wrongly, freed too early, written twice or forgotten changes the tokens from there on.
For each window it is given there is one more layer, with pages of its own, that reads no further
back than the window.

`expected_tokens` is the same function without pages, batches or steps: what each request must get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxinfer.batch import StepPlan, StepResult
from jaxinfer.page_groups import WindowPool
from jaxinfer.request import Request, TokenLogprobs, TokenOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler import Scheduler

VOCAB_SIZE = 97
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64s, one to one (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _embed(token_ids: Sequence[int], start: int) -> np.ndarray:
    """Layer 0: a state of token and position."""
    positions = np.arange(start, start + len(token_ids), dtype=np.uint64)
    return _mix(np.asarray(token_ids, np.uint64) * _ODD + positions + np.uint64(1))


def _attend(history: np.ndarray) -> np.ndarray:
    """Layer 1: at each position a hash of everything up to it."""
    return _mix(np.cumsum(_mix(history + _ODD), dtype=np.uint64))


def _look_back(history: np.ndarray, window: int) -> np.ndarray:
    """A layer with a window: at each position a hash of the last states, its own included."""
    sums = np.cumsum(_mix(history + np.uint64(window)), dtype=np.uint64)
    behind = np.concatenate([np.zeros(window, np.uint64), sums])[: len(sums)]
    return _mix(sums - behind)


def _forward(token_ids: Sequence[int], windows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return what layer 1 gives at each position, and what the last layer gives."""
    history = _attend(_embed(token_ids, 0))
    states = history
    for window in windows:
        states = states ^ _look_back(states, window)
    return history, states


def _sample(history: np.ndarray, seed: int) -> int:
    """Head: the next token, of the last layer's whole history, the seed and the position."""
    total = np.bitwise_xor.reduce(_mix(history + np.uint64(7)))
    draw = np.asarray([total ^ np.uint64(seed % 2**64), np.uint64(len(history))], np.uint64)
    return int(_mix(np.cumsum(_mix(draw), dtype=np.uint64))[-1] % np.uint64(VOCAB_SIZE))


def _logprob(state: np.uint64) -> TokenLogprobs:
    return TokenLogprobs(logprob=-float(state % np.uint64(1000)) / 100, rank=1)


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    *,
    seed: int = 0,
    eos_token_ids: Sequence[int] = (),
    priority: int = 0,
    cache_salt: str = "",
    arrival_time: float = 0.0,
    max_total_tokens: int | None = None,
    **params,
) -> Request:
    """Return a request as the engine makes it; `params` are `SamplingParams`' fields."""
    sampling_params = SamplingParams(**params)
    if max_total_tokens is None:
        max_total_tokens = len(prompt_token_ids) + sampling_params.max_tokens
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=sampling_params,
        seed=seed,
        max_total_tokens=max_total_tokens,
        eos_token_ids=frozenset(eos_token_ids),
        priority=priority,
        cache_salt=cache_salt,
        arrival_time=arrival_time,
    )


def expected_tokens(request: Request, windows: Sequence[int] = ()) -> list[int]:
    """Return the output that `request` has to get, whoever its neighbours are."""
    token_ids = list(request.prompt_token_ids)
    params = request.params
    stops = {*request.eos_token_ids} if not params.ignore_eos else set()
    stops |= {*params.stop_token_ids}
    output: list[int] = []
    while len(token_ids) < request.max_total_tokens:
        history, states = _forward(token_ids, windows)
        output.append(_sample(np.append(history[:-1], states[-1]), request.seed))
        token_ids.append(output[-1])
        if output[-1] in stops and len(output) > params.min_tokens:
            break
    return output


def expected_prompt_logprobs(
    request: Request, windows: Sequence[int] = ()
) -> tuple[TokenLogprobs | None, ...]:
    """Return what a request that asked for `prompt_logprobs` has to get with its first token."""
    _, states = _forward(request.prompt_token_ids, windows)
    return (None, *(_logprob(state) for state in states[:-1]))


@dataclass(kw_only=True)
class FakeLogits:
    """Outcome of `FakeRunner.forward`: per sampling row the history that the last layer read."""

    histories: list[np.ndarray]
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]]


class FakeRunner:
    """Stands in for `jaxinfer.model_runner.ModelRunner`: `forward`, `sample`, `fetch`.

    Everything it needs of a request's pages and tokens is read in `forward`, when the real runner
    packs its arrays; the calls take effect in their order, as on a device.

    Attributes:
        corrupt: `(request, position)` → whether the logits there hold a NaN.
        num_tokens_run: Tokens computed so far, repetitions included.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        window_pools: Sequence[WindowPool] = (),
        corrupt: Callable[[Request, int], bool] = lambda request, position: False,
    ):
        self.page_size = page_size
        self.corrupt = corrupt
        self.num_tokens_run = 0
        rng = np.random.default_rng(0)
        # Never-written memory holds noise, so that reading it is noticed.
        self._layers = rng.integers(2**63, size=(2, num_pages * page_size), dtype=np.uint64)
        self._window_layers = [
            rng.integers(2**63, size=pool.num_pages * page_size, dtype=np.uint64)
            for pool in window_pools
        ]
        self.windows = tuple(pool.window for pool in window_pools)
        self._last_sampled: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        return self.fetch(plan, self.sample(plan, self.forward(plan)))

    def forward(self, plan: StepPlan) -> FakeLogits:
        """Compute the planned tokens; layer by layer, writes before reads."""
        return self._forward(plan, [self._token_ids(row) for row in plan.rows])

    def decode(self, plan: StepPlan) -> StepResult:
        """Run decode steps as the device does: no look at the host in between."""
        assert plan.rows == plan.sampling_rows and plan.num_decode_rows == len(plan.rows)
        newest = {row.request.request_id: self._token_ids(row)[0] for row in plan.rows}
        # A token still in flight may be the last one.
        running = [row for row in plan.rows if not self._ends(row.request, newest, row.end)]
        results: dict[str, list[int]] = {request_id: [] for request_id in newest}
        logprobs: dict[str, list[TokenLogprobs]] = {request_id: [] for request_id in newest}
        corrupted = set()
        for step in range(plan.num_decode_steps):
            rows = tuple(
                replace(row, start=row.start + step) for row in running if step < row.num_steps
            )
            if not rows:
                break
            token_ids = [[newest[row.request.request_id]] for row in rows]
            step_plan = StepPlan(rows=rows)
            sampled = self.sample(step_plan, self._forward(step_plan, token_ids))
            for row, tokens, bad, entries in zip(
                rows, sampled.token_ids, sampled.corrupted, sampled.logprobs, strict=True
            ):
                request_id = row.request.request_id
                results[request_id] += tokens
                logprobs[request_id] += entries or ()
                newest[request_id] = tokens[0] if tokens else -1
                corrupted |= {request_id} if bad else set()
            running = [
                row
                for row in running
                if row.request.request_id not in corrupted
                and not self._ends(row.request, newest, row.end + step + 1)
            ]
        # Nobody may take a token of these steps from the device.
        self._last_sampled = []
        return StepResult(
            token_ids=tuple(map(tuple, results.values())),
            corrupted=tuple(request_id in corrupted for request_id in results),
            logprobs=tuple(
                None if row.request.params.logprobs is None else tuple(entries)
                for row, entries in zip(plan.rows, logprobs.values(), strict=True)
            ),
        )

    @staticmethod
    def _ends(request: Request, newest: dict[str, int], num_tokens: int) -> bool:
        ends = {*request.eos_token_ids, *request.params.stop_token_ids}
        num_output_tokens = num_tokens - request.num_prompt_tokens
        is_end = newest[request.request_id] in ends
        return is_end and num_output_tokens > request.params.min_tokens

    def _forward(self, plan: StepPlan, token_ids: list[list[int]]) -> FakeLogits:
        assert all(row.num_scheduled_tokens > 0 for row in plan.rows), "a row without tokens"
        layer0, layer1 = self._layers
        slots = [self._slots(row.request.page_ids, 0, row.end) for row in plan.rows]
        self._check_written(plan, slots)
        for row, row_slots, row_ids in zip(plan.rows, slots, token_ids, strict=True):
            layer0[row_slots[row.start :]] = _embed(row_ids, row.start)
        for row, row_slots in zip(plan.rows, slots, strict=True):
            layer1[row_slots[row.start :]] = _attend(layer0[row_slots])[row.start :]
        states = [layer1[s][row.start :] for row, s in zip(plan.rows, slots, strict=True)]
        for group, window in enumerate(self.windows):
            states = self._look_back(plan, states, group, window)
        self.num_tokens_run += plan.num_tokens
        histories, prompt_logprobs = [], {}
        for row, row_slots, row_states in zip(plan.rows, slots, states, strict=True):
            if row.samples:
                histories.append(np.append(layer1[row_slots][:-1], row_states[-1]))
            request = row.request
            last = min(row.end, request.num_prompt_tokens - 1)
            if request.params.prompt_logprobs is not None and row.start < last:
                scored = row_states[: last - row.start]
                prompt_logprobs[request.request_id] = tuple(map(_logprob, scored))
        return FakeLogits(histories=histories, prompt_logprobs=prompt_logprobs)

    def sample(self, plan: StepPlan, logits: FakeLogits, masks: object = None) -> StepResult:
        """Draw a token per sampling row; the next `forward` may take them from here."""
        rows = plan.sampling_rows
        corrupted = tuple(self.corrupt(row.request, row.end) for row in rows)
        token_ids = tuple(
            () if bad else (_sample(history, row.request.seed),)
            for row, history, bad in zip(rows, logits.histories, corrupted, strict=True)
        )
        self._last_sampled = [ids[0] if ids else 0 for ids in token_ids]
        return StepResult(
            token_ids=token_ids,
            corrupted=corrupted,
            logprobs=tuple(
                None if row.request.params.logprobs is None else (_logprob(history[-1]),)
                for row, history in zip(rows, logits.histories, strict=True)
            ),
            prompt_logprobs=logits.prompt_logprobs,
        )

    def fetch(self, plan: StepPlan, sampled: StepResult) -> StepResult:
        assert len(sampled.token_ids) == len(plan.sampling_rows)
        return sampled

    identity = {"model": "a hash", "weights": "none"}

    def register(self, processors: object) -> None:
        assert not processors, "a hash has no logits"

    def processor_named(self, name: str, leaves: object) -> None:
        raise AssertionError(name)

    def processor_states(self, request: Request) -> list:
        return []

    def restore_states(self, request: Request, states: list) -> None:
        assert not states

    def forget(self, request_id: str) -> None:
        """It remembers nothing of a request."""

    @property
    def num_programs(self) -> int:
        return 0

    num_programs_pending = 0

    def max_decode_steps(self, num_rows: int) -> int:
        return 8

    def finish_warmup(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _look_back(
        self, plan: StepPlan, states: list[np.ndarray], group: int, window: int
    ) -> list[np.ndarray]:
        """Run the layer of a window, reading through the pages of its group."""
        layer = self._window_layers[group]
        firsts = [max(row.start - window + 1, 0) for row in plan.rows]
        slots = [
            self._slots(row.request.window_pages[group].page_ids, first, row.end)
            for row, first in zip(plan.rows, firsts, strict=True)
        ]
        counts = [row.num_scheduled_tokens for row in plan.rows]
        self._check_written(plan, slots)
        for s, n, new in zip(slots, counts, states, strict=True):
            layer[s[-n:]] = new
        return [
            new ^ _look_back(layer[s], window)[-n:]
            for s, n, new in zip(slots, counts, states, strict=True)
        ]

    def _slots(self, page_ids: Sequence[int], start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        pages = np.asarray(page_ids)[positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def _check_written(self, plan: StepPlan, slots: list[np.ndarray]) -> None:
        rows = zip(plan.rows, slots, strict=True)
        written = np.concatenate([s[-row.num_scheduled_tokens :] for row, s in rows])
        assert np.unique(written).size == plan.num_tokens, "two tokens want the same slot"

    def _token_ids(self, row) -> list[int]:
        token_ids = row.request.token_ids[row.start : row.end]
        if row.pending_row >= 0:
            token_ids.append(self._last_sampled[row.pending_row])
        assert len(token_ids) == row.num_scheduled_tokens, "a token that nobody knows"
        return token_ids


class StepLoop:
    """The engine's loop around a scheduler and a runner, plain or overlapped; one thread.

    Attributes:
        plans: Every plan so far.
        outputs: Every output so far, in order.
        max_steps: More steps than that without an end are taken for a hang.
        decode_steps: Most decode steps in one dispatch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: FakeRunner,
        *,
        overlap: bool,
        max_steps: int = 10_000,
        decode_steps: int = 1,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.overlap = overlap
        self.max_steps = max_steps
        self.decode_steps = decode_steps
        self.plans: list[StepPlan] = []
        self.outputs: list[TokenOutput] = []
        self._in_flight: tuple[StepPlan, StepResult] | None = None

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or self._in_flight is not None

    def step(self) -> list[TokenOutput]:
        outputs = self._overlapped() if self.overlap else self._plain()
        self.outputs += outputs
        return outputs

    def _schedule(self) -> StepPlan:
        self.plans.append(self.scheduler.schedule(self.decode_steps))
        return self.plans[-1]

    def _plain(self) -> list[TokenOutput]:
        plan = self._schedule()
        if plan.num_decode_steps > 1:
            return self.scheduler.update(plan, self.runner.decode(plan))
        return self.scheduler.update(plan, self.runner.run(plan)) if plan else []

    def _overlapped(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        if self._in_flight is not None and self._in_flight[0].num_decode_steps > 1:
            outputs = self._learn()
        plan = self._schedule()
        if plan.num_decode_steps > 1:
            sampled = self.runner.decode(plan)
            outputs += self._learn()
        else:
            logits = self.runner.forward(plan) if plan else None
            outputs += self._learn()
            sampled = self.runner.sample(plan, logits) if plan else None
        self._in_flight = (plan, sampled) if plan else None
        return outputs

    def _learn(self) -> list[TokenOutput]:
        if self._in_flight is None:
            return []
        (plan, sampled), self._in_flight = self._in_flight, None
        return self.scheduler.update(plan, self.runner.fetch(plan, sampled))

    def run(self) -> dict[str, list[int]]:
        """Step until all is done; return each request's output tokens."""
        for _ in range(self.max_steps):
            if not self.has_unfinished:
                return self.tokens()
            self.step()
        raise AssertionError(f"not done after {self.max_steps} steps")

    def tokens(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for output in self.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens
