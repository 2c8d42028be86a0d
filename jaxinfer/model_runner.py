"""A `StepPlan` in, tokens out: pads to buckets, calls compiled programs, fetches results.

Owns everything on the device: weights, cache, the tokens sampled last. Knows no queue, no policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch import SampledTokens, ScheduledRow, StepPlan, StepResult
from jaxinfer.builtin_processors import BUILT_INS
from jaxinfer.compilation import Programs, bucket_of, sizes_from
from jaxinfer.errors import SnapshotError
from jaxinfer.hook_programs import Captured, HookPrograms
from jaxinfer.kv_cache import KVCache, describe, in_large_pages, make_cache
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.models import ModelConfig, Transformer
from jaxinfer.page_tables import PageTables
from jaxinfer.processed_programs import ProcessedPrograms
from jaxinfer.processing import ProcessorKind
from jaxinfer.processor_slots import ProcessorSlots
from jaxinfer.request import Pooling, Request, TokenLogprobs
from jaxinfer.sampler import Logprobs
from jaxinfer.sampling_batch import PackedSampling, SamplingPacker, neutral_bias, neutral_mask
from jaxinfer.sharding import page_sharding, place, replicated
from jaxinfer.step_programs import SCORED_TOKENS, RunnerConfig, StepPrograms, cache_shape


@dataclass(frozen=True)
class Hidden:
    """What the backbone leaves on the device.

    Attributes:
        sampled: [B, D], hidden states of the sampling rows.
        tokens: [T, D], hidden states of all tokens.
        captured: What hooks asked to see.
    """

    sampled: jax.Array
    tokens: jax.Array
    captured: Captured | None = None


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of up to `SCORED_TOKENS` consecutive prompt tokens, on the device.

    Attributes:
        request: Whose prompt.
        count: Entries that mean something.
        scores: The log-probabilities.
    """

    request: Request
    count: int
    scores: Logprobs


@dataclass(frozen=True)
class AskedScores:
    """Log-probabilities of up to `SCORED_TOKENS` tokens that a request asks about, on the device.

    Attributes:
        row: Which sampling row.
        count: Entries that mean something.
        scores: The log-probabilities.
    """

    row: int
    count: int
    scores: Logprobs


@dataclass(frozen=True)
class InFlight:
    """A sampled step that has not been fetched.

    Attributes:
        sampled: The tokens; None if the step samples none.
        prompt_scores: Scored parts of prompts, in order.
        counts: Of several decode steps: tokens by row.
        pooled: float32 [max_num_seqs, D], sums of hidden states, entry i for the i-th row of the
            plan that pools; None if there is none.
        asked: Log-probabilities of `logprob_token_ids`, in order.
        captured: What hooks asked to see.
    """

    sampled: SampledTokens | None
    prompt_scores: tuple[PromptScores, ...] = ()
    counts: jax.Array | None = None
    pooled: jax.Array | None = None
    asked: tuple[AskedScores, ...] = ()
    captured: Captured | None = None


class ModelRunner:
    """Runs steps of one model on one mesh.

    Args:
        model_config: The model's sizes.
        model: Abstract, as built under `nnx.eval_shape`.
        parameters: Arrays by dotted path, each in its sharding, or what they will be: programs can
            be compiled while they are read, and run after `fill`.
        mesh: The devices.
        config: The shapes to serve.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        model: Transformer,
        parameters: Mapping[str, Any],
        mesh: jax.sharding.Mesh,
        config: RunnerConfig,
    ):
        self.config = config
        self._model_config = model_config
        self._vocab_size = model_config.vocab_size
        self._whole = replicated(mesh)
        shape = cache_shape(model_config, config.windows, config.page_size, config.page_dtype)
        pages = page_sharding(mesh, model_config.num_key_value_heads)
        make = partial(make_cache, shape, config.group_pages, (pages, self._whole))
        # On a CPU a gigabyte of zeros takes half a second, in which compiling can begin.
        beside = ThreadPoolExecutor(1)
        self._allocated = beside.submit(lambda: in_large_pages(make()))
        beside.shutdown(wait=False)
        self._pages: KVCache | None = None
        self.programs = StepPrograms(model, parameters, mesh, config, make(zeros=describe))
        self._hooks = HookPrograms(self.programs)
        self._packer = SamplingPacker(model_config.vocab_size)
        self._layouts = {T: config.layout(T) for T in config.token_buckets}
        self._decode_layouts = {B: config.decode_layout(B) for B in config.row_buckets}
        self._tables = PageTables(len(config.group_pages), config.max_pages)
        self._last_sampled = self._put(np.zeros(config.max_num_seqs, np.int32))
        self._neutral = {B: self._neutral_parts(B) for B in config.row_buckets}
        num_tokens = config.max_pages * config.page_size
        self._slots = ProcessorSlots(
            config.max_num_seqs, model_config.vocab_size, num_tokens, self._put
        )
        self._processed: ProcessedPrograms | None = None
        self.register(config.logits_processors)

    def fill(self, parameters: Mapping[str, jax.Array]) -> None:
        """Take the arrays that were only described so far."""
        self.programs.fill(parameters)
        _ = self._cache  # what went wrong with it is told here

    @property
    def _cache(self) -> KVCache:
        if self._pages is None:
            self._pages = self._allocated.result()
            del self._allocated  # or it would hold what the first step takes
        return self._pages

    @_cache.setter
    def _cache(self, cache: KVCache) -> None:
        self._pages = cache

    def register(self, processors: Sequence[LogitsProcessor]) -> None:
        """Take up logits processors; those that are new cost programs, compiled when they are used.

        Raises:
            InvalidRequestError: One is faulty, or there are too many.
        """
        if not self._slots.add_kinds(processors):
            return
        if self._processed is not None:
            self._processed.compiled.close()
        self._processed = ProcessedPrograms(self.programs, self._slots.kinds, self._slots.stored)

    def processor_named(self, name: str, leaves: list[np.ndarray]) -> LogitsProcessor:
        """Return the processor of that name, of the set or built in, with this state.

        Raises:
            SnapshotError: There is none, or several, or its state has another form.
        """
        kinds = self._slots.named(name)
        if not kinds:
            made = [ProcessorKind.of(make())[0] for make in BUILT_INS.values()]
            kinds = [kind for kind in made if kind.name == name]
        forms = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        kinds = [kind for kind in kinds if kind.leaves == forms]
        if len(kinds) != 1:
            raise SnapshotError(
                f"the snapshot needs one logits processor {name} with a state of {len(leaves)}"
                f" arrays, there are {len(kinds)}; start the engine with it in logits_processors"
            )
        return LogitsProcessor(kinds[0].function, jax.tree.unflatten(kinds[0].treedef, leaves))

    def processor_states(self, request: Request) -> list[list[np.ndarray]]:
        """Return the states of a request's processors before its next token."""
        return self._slots.states_of(request) if request.params.processors else []

    def restore_states(self, request: Request, states: list[list[np.ndarray]]) -> None:
        """Let a request's processors go on from these states."""
        if states:
            self._slots.restore(request, states)

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """What tells this model from others: digests of its sizes and of its weights."""
        sizes = hashlib.blake2b(repr(self._model_config).encode(), digest_size=8).hexdigest()
        leaves = (*self.programs.backbone.leaves, *self.programs.head.leaves)
        return {"model": sizes, "weights": f"{int(jax.jit(checksum)(leaves)):08x}"}

    def start_compiling(self, *, all_first: bool = False) -> None:
        """Let threads compile what is needed first, and with `warmup` the rest; returns at once.

        Args:
            all_first: Nothing is served before the last one is ready, so none is put off.
        """
        compiled = self.programs.compiled
        compiled.start(tuple(compiled.keys()) if all_first else self.programs.first, hold_rest=True)
        if self._processed is not None:
            self._processed.compiled.start(self._processed.first, hold_rest=True)

    def warmup(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Wait for the programs that everything can be served with, and call the small ones once.

        The others follow while the engine serves; `finish_warmup` waits for them.
        """
        self.start_compiling()
        self.programs.compiled.wait(self.programs.first, on_progress)
        if self._processed is not None:
            self._processed.compiled.wait(self._processed.first)
        hidden = self.forward(StepPlan(rows=()), self.config.token_buckets[0])
        B = self.config.row_buckets[-1]
        self.call_sampler(B, hidden.sampled, self._packer.pack((), B), None)
        jax.block_until_ready(self._last_sampled)
        self.programs.compiled.go_on()
        if self._processed is not None:
            self._processed.compiled.go_on()

    def finish_warmup(
        self, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Wait until every program is compiled."""
        self.start_compiling()
        self.programs.compiled.wait(on_progress=on_progress)
        if self._processed is not None:
            self._processed.compiled.wait()

    def close(self) -> None:
        """Compile nothing more in advance."""
        self.programs.compiled.close()
        if self._processed is not None:
            self._processed.compiled.close()

    def forward(self, plan: StepPlan, bucket: int | None = None) -> Hidden:
        """Dispatch the backbone over the plan's tokens; returns before it is done."""
        if self._hooks.wanted(plan):
            return self._forward_hooked(plan)
        T = bucket or self._bucket("backbone", plan.num_tokens, self.config.token_buckets)
        return self.call_backbone(T, self._layouts[T].pack(plan, self._tables))

    def sample(
        self, plan: StepPlan, hidden: Hidden, masks: Mapping[str, np.ndarray] | None = None
    ) -> InFlight:
        """Dispatch head and sampler. All earlier tokens of the plan must have reached the host.

        Args:
            plan: The step.
            hidden: What `forward` returned for it.
            masks: request_id → uint32 [ceil(V / 32)], bit set for the tokens that are allowed.
        """
        scores = self._score_prompts(plan, hidden)
        pooled = self._pool_prompts(plan, hidden)
        rows = plan.sampling_rows
        if not rows:
            return InFlight(None, scores, pooled=pooled, captured=hidden.captured)
        processed = self._processed_for(rows)
        B = self._bucket("sampler", len(rows), self.config.row_buckets, processed)
        packed = self._packer.pack(rows, B, extra_masks=masks)
        page_table = self._page_table(rows, B)
        if processed is None:
            sampled = self.call_sampler(B, hidden.sampled, packed, page_table)
        else:
            arguments = self._sampler_arguments(B, hidden.sampled, packed, page_table)
            sampled, self._last_sampled, self._slots.stored = processed["sampler", B](
                *arguments, self._slots.stored, *self._slots.pack(rows, B)
            )
        asked = self._score_asked(plan, hidden)
        return InFlight(sampled, scores, pooled=pooled, asked=asked, captured=hidden.captured)

    def decode(self, plan: StepPlan) -> InFlight:
        """Dispatch all decode steps of a plan, from tokens to tokens.

        Tokens of the step before may still be in flight.
        """
        rows = plan.rows
        processed = self._processed_for(rows)
        B = self._bucket("decode", len(rows), self.config.row_buckets, processed)
        packed = self._decode_layouts[B].pack(plan, self._tables)
        limits = self._packer.pack_limits(rows, B)
        sampling = self._packer.pack(rows, B)
        if processed is None:
            return self.call_decode(B, packed, limits, sampling)
        arguments = self._decode_arguments(B, packed, limits, sampling)
        self._cache, sampled, counts, self._slots.stored = processed["decode", B](
            *arguments, self._slots.stored, *self._slots.pack(rows, B)
        )
        return InFlight(sampled, counts=counts)

    def call_decode(
        self, B: int, packed: np.ndarray, limits: np.ndarray, sampling: PackedSampling
    ) -> InFlight:
        """Dispatch the decode program of B rows."""
        arguments = self._decode_arguments(B, packed, limits, sampling)
        self._cache, sampled, counts = self.programs.compiled["decode", B](*arguments)
        return InFlight(sampled, counts=counts)

    def _decode_arguments(
        self, B: int, packed: np.ndarray, limits: np.ndarray, sampling: PackedSampling
    ) -> tuple[Any, ...]:
        bias, allowed, _ = self._neutral[B]
        return (
            (self.programs.backbone.leaves, self.programs.head.leaves),
            self._cache,
            packed,
            self._last_sampled,
            limits,
            sampling.rows,
            bias if sampling.bias is None else sampling.bias,
            allowed if sampling.allowed is None else sampling.allowed,
        )

    def _processed_for(self, rows: Sequence[ScheduledRow]) -> Programs | None:
        """Return the programs for these rows if any of them has a logits processor."""
        if self._processed is None or not self._slots.uses(rows):
            return None
        return self._processed.compiled

    def fetch(self, plan: StepPlan, step: InFlight) -> StepResult:
        """Wait for a step's tokens and bring them to the host; alternatives only if asked for."""
        if step.counts is not None:
            return self._fetch_steps(plan, step)
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        for part in step.prompt_scores:
            request = part.request
            entries = _entries(part.scores, [request.params.prompt_logprobs] * part.count)
            known = prompt_logprobs.setdefault(request.request_id, [])
            known.extend(entry for entry in entries if entry is not None)
        pooled = {}
        if step.pooled is not None:
            ids = [row.request.request_id for row in plan.rows if row.request.pooling is not None]
            pooled = dict(zip(ids, jax.device_get(step.pooled), strict=False))
        captured = {} if step.captured is None else step.captured.fetch()
        rows = plan.sampling_rows
        if step.sampled is None:
            return StepResult(
                token_ids=(),
                corrupted=(),
                logprobs=(),
                prompt_logprobs=_frozen(prompt_logprobs),
                pooled=pooled,
                captured=captured,
            )
        fetched = jax.device_get((step.sampled.token_ids, step.sampled.corrupted))
        token_ids, corrupted = (x[: len(rows)].tolist() for x in fetched)
        tokens: list[tuple[int, ...]] = list(zip(token_ids, strict=True))
        if any(corrupted):
            tokens = [() if bad else t for t, bad in zip(tokens, corrupted, strict=True)]
        widths = [row.request.params.logprobs for row in rows]
        logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * len(rows)
        if any(width is not None for width in widths):
            entries = _entries(_scores(step.sampled), widths)
            for part in step.asked:
                entry = entries[part.row]
                assert entry is not None, "SamplingParams asks for both or none"
                values, ranks = jax.device_get((part.scores.logprobs, part.scores.ranks))
                more = zip(values[: part.count].tolist(), ranks[: part.count].tolist(), strict=True)
                entries[part.row] = replace(entry, asked=(*entry.asked, *more))
            logprobs = [None if entry is None else (entry,) for entry in entries]
        return StepResult(
            token_ids=tuple(tokens),
            corrupted=tuple(corrupted),
            logprobs=tuple(logprobs),
            prompt_logprobs=_frozen(prompt_logprobs),
            pooled=pooled,
            captured=captured,
        )

    def _fetch_steps(self, plan: StepPlan, step: InFlight) -> StepResult:
        sampled = step.sampled
        assert sampled is not None, "decode steps sample"
        fetched = jax.device_get((step.counts, sampled.token_ids, sampled.corrupted))
        counts, token_ids, corrupted = fetched
        n = len(plan.rows)
        widths = [row.request.params.logprobs for row in plan.rows]
        logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * n
        if any(width is not None for width in widths):
            scores = jax.device_get(_scores(sampled))
            steps = [Logprobs(*arrays) for arrays in zip(*scores, strict=True)]
            entries = [_entries(step, widths) for step in steps[: counts[:n].max()]]
            logprobs = [
                None if width is None else tuple(e for step in entries[:count] if (e := step[i]))
                for i, (width, count) in enumerate(zip(widths, counts, strict=False))
            ]
        rows = zip(token_ids.T[:n].tolist(), counts.tolist(), strict=False)
        return StepResult(
            token_ids=tuple(tuple(tokens[:count]) for tokens, count in rows),
            corrupted=tuple(corrupted.any(axis=0)[:n].tolist()),
            logprobs=tuple(logprobs),
        )

    def max_decode_steps(self, num_rows: int) -> int:
        """How many decode steps a dispatch of so many rows may have now."""
        if self.config.num_decode_steps == 1 or not num_rows:
            return 1
        sizes = sizes_from(num_rows, self.config.row_buckets)
        ready = self.programs.compiled.smallest_ready("decode", sizes)
        if self._processed is not None and len(self._slots):
            ready = ready and self._processed.compiled.smallest_ready("decode", sizes)
        return 1 if ready is None else self.config.num_decode_steps

    @property
    def windows(self) -> tuple[int, ...]:
        """Each has a group of pages of its own, besides those that hold whole sequences."""
        return self.config.windows

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        processed = 0 if self._processed is None else len(self._processed.compiled)
        return len(self.programs.compiled) + processed + len(self._hooks)

    @property
    def hook_points(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """What requests may capture and edit: name → shape [T, ...] and dtype."""
        return self._hooks.points

    @property
    def num_programs_pending(self) -> int:
        """Programs that will be compiled while the engine serves."""
        processed = 0 if self._processed is None else self._processed.compiled.num_pending
        return self.programs.compiled.num_pending + processed

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a finished request."""
        self._packer.forget(request_id)
        self._tables.forget(request_id)
        self._slots.forget(request_id)

    def _bucket(
        self, kind: str, count: int, sizes: Sequence[int], programs: Programs | None = None
    ) -> int:
        """Return the smallest bucket that holds `count` and whose program is ready.

        If there is none yet, the smallest that holds it, which is then waited for.
        """
        sizes = sizes_from(count, sizes)
        return (programs or self.programs.compiled).smallest_ready(kind, sizes) or sizes[0]

    def call_backbone(self, T: int, packed: np.ndarray) -> Hidden:
        """Dispatch the backbone program of T tokens."""
        self._cache, sampled, tokens = self.programs.compiled["backbone", T](
            self.programs.backbone.leaves, self._cache, packed, self._last_sampled
        )
        return Hidden(sampled, tokens)

    def _forward_hooked(self, plan: StepPlan) -> Hidden:
        T = bucket_of(plan.num_tokens, self.config.token_buckets)
        packed = self._layouts[T].pack(plan, self._tables)
        self._cache, sampled, tokens, captured = self._hooks.forward(
            plan, T, self._cache, packed, self._last_sampled
        )
        return Hidden(sampled, tokens, captured)

    def call_sampler(
        self, B: int, hidden: jax.Array, packed: PackedSampling, page_table: np.ndarray | None
    ) -> SampledTokens:
        """Dispatch head and sampler for B rows."""
        sampled, self._last_sampled = self.programs.compiled["sampler", B](
            *self._sampler_arguments(B, hidden, packed, page_table)
        )
        return sampled

    def _sampler_arguments(
        self, B: int, hidden: jax.Array, packed: PackedSampling, page_table: np.ndarray | None
    ) -> tuple[Any, ...]:
        bias, allowed, no_pages = self._neutral[B]
        return (
            self.programs.head.leaves,
            hidden,
            self._cache.token_ids,
            packed.rows,
            bias if packed.bias is None else packed.bias,
            allowed if packed.allowed is None else packed.allowed,
            no_pages if page_table is None else page_table,
        )

    def call_score(
        self, T: int, hidden: jax.Array, indices: np.ndarray, token_ids: np.ndarray
    ) -> Logprobs:
        """Dispatch the scoring of `token_ids` by the hidden states at `indices`."""
        rows = self.programs.compiled["rows", T](hidden, indices)
        return self.programs.compiled["score",](self.programs.head.leaves, rows, token_ids)

    def _score_prompts(self, plan: StepPlan, hidden: Hidden) -> tuple[PromptScores, ...]:
        """Score the prompt tokens behind those of this step, for the requests that ask."""
        parts = []
        first = 0
        for row in plan.rows:
            request = row.request
            if request.params.prompt_logprobs is not None:
                T = hidden.tokens.shape[0]
                # The state at position p tells about the token at p + 1.
                end = min(row.end, request.num_prompt_tokens - 1)
                begin = max(row.start, request.first_scored - 1)
                for start in range(begin, end, SCORED_TOKENS):
                    n = min(SCORED_TOKENS, end - start)
                    indices, targets = np.zeros((2, SCORED_TOKENS), np.int32)
                    indices[:n] = first + (start - row.start) + np.arange(n)
                    targets[:n] = request.token_ids[start + 1 : start + 1 + n]
                    scores = self.call_score(T, hidden.tokens, indices, targets)
                    parts.append(PromptScores(request, n, scores))
            first += row.num_scheduled_tokens
        return tuple(parts)

    def _score_asked(self, plan: StepPlan, hidden: Hidden) -> tuple[AskedScores, ...]:
        """Score the tokens that requests ask about, with the program that scores prompts."""
        parts = []
        T, first, index = hidden.tokens.shape[0], 0, 0
        for row in plan.rows:
            first += row.num_scheduled_tokens
            if not row.samples:
                continue
            ids = row.request.params.logprob_token_ids or ()
            for start in range(0, len(ids), SCORED_TOKENS):
                some = ids[start : start + SCORED_TOKENS]
                targets = np.zeros(SCORED_TOKENS, np.int32)
                targets[: len(some)] = some
                indices = np.full(SCORED_TOKENS, first - 1, np.int32)
                scores = self.call_score(T, hidden.tokens, indices, targets)
                parts.append(AskedScores(index, len(some), scores))
            index += 1
        return tuple(parts)

    def _pool_prompts(self, plan: StepPlan, hidden: Hidden) -> jax.Array | None:
        """Sum the hidden states that count, for all requests that ask for a vector at once."""
        if all(row.request.pooling is None for row in plan.rows):
            return None
        T = hidden.tokens.shape[0]
        slots = np.full(T, self.config.max_num_seqs, np.int32)
        slot, first = 0, 0
        for row in plan.rows:
            end = first + row.num_scheduled_tokens
            if row.request.pooling is not None:
                if row.request.pooling is Pooling.MEAN:
                    slots[first:end] = slot
                elif row.samples:
                    slots[end - 1] = slot
                slot += 1
            first = end
        return self.call_pool(T, hidden.tokens, slots)

    def call_pool(self, T: int, hidden: jax.Array, slots: np.ndarray) -> jax.Array:
        """Dispatch the pooling program of T tokens."""
        return self.programs.compiled["pool", T](hidden, slots)

    def _page_table(self, rows: tuple[ScheduledRow, ...], B: int) -> np.ndarray | None:
        """Pages of the rows whose history the sampler must read; None if there are none."""
        if not any(row.request.params.needs_history for row in rows):
            return None
        table = np.zeros((B, self.config.max_pages), np.int32)
        indices = self._tables.rows_of([row.request for row in rows])
        table[: len(rows)] = self._tables.arrays[0, indices]
        return table

    def _neutral_parts(self, B: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the sampler is given where no row asks for more; put on the device once."""
        V = self._vocab_size
        no_pages = np.zeros((B, self.config.max_pages), np.int32)
        return (
            self._put(neutral_bias(B, V)),
            self._put(neutral_mask(B, V)),
            self._put(no_pages),
        )

    def _put(self, x: np.ndarray) -> jax.Array:
        return place(x, self._whole)


def checksum(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return uint32 [], of the bits of all arrays: exact, so the same however they are sharded."""
    total = jnp.uint32(0)
    for leaf in leaves:
        words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf, words).astype(jnp.uint32)
        weights = jnp.ones_like(bits)
        for axis in range(bits.ndim):
            place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            weights = weights * jnp.uint32(0x9E3779B1) + place
        total = total * jnp.uint32(31) + jnp.sum(bits * (weights | 1), dtype=jnp.uint32)
    return total


def _entries(scores: Logprobs, widths: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Fetch the first rows of `scores`, each with as many alternatives as asked; None for None."""
    columns = (np.asarray(x)[: len(widths)].tolist() for x in jax.device_get(scores))
    return [
        None
        if width is None
        else TokenLogprobs(
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(ids[:width]),
            top_logprobs=tuple(values[:width]),
        )
        for logprob, rank, ids, values, width in zip(*columns, widths, strict=True)
    ]


def _scores(sampled: SampledTokens) -> Logprobs:
    s = sampled
    return Logprobs(s.logprobs, s.ranks, s.top_token_ids, s.top_logprobs)


def _frozen(entries: Mapping[str, list[TokenLogprobs]]) -> dict[str, tuple[TokenLogprobs, ...]]:
    return {request_id: tuple(known) for request_id, known in entries.items()}
