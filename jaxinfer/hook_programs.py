"""Steps in which some request looks inside the model or changes it: programs of their own.

They are traced with a tap and compiled when first needed, so that what nobody asks for costs
nothing: all other steps run the programs that they would run if this file did not exist. Rows
without hooks may share such a step; their values pass through it untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch import StepPlan
from jaxinfer.compilation import bucket_of
from jaxinfer.edits import structure
from jaxinfer.forward_batch import BatchLayout, ForwardBatch
from jaxinfer.hook_tap import HookTap, hook_points
from jaxinfer.hooks import CapturedChunk
from jaxinfer.kv_cache import KVCache
from jaxinfer.nn.tap import Tap
from jaxinfer.step_programs import StepPrograms


@dataclass(frozen=True)
class CapturedRow:
    """Which of a step's captured tokens belong to a request, and what it asked for."""

    request_id: str
    positions: np.ndarray
    first: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Captured:
    """What a step captured, on the device.

    Attributes:
        arrays: name → [C, ...], the tokens asked for, padded to a bucket.
        rows: Whose they are.
    """

    arrays: Mapping[str, jax.Array]
    rows: tuple[CapturedRow, ...]

    def fetch(self) -> dict[str, CapturedChunk]:
        """Bring it to the host, by request."""
        arrays = jax.device_get(dict(self.arrays))
        chunks = {}
        for row in self.rows:
            span = slice(row.first, row.first + len(row.positions))
            # Copies, or a token that is kept would keep its whole step.
            values = {name: np.array(arrays[name][span]) for name in row.names}
            chunks[row.request_id] = CapturedChunk(row.positions, values)
        return chunks


@dataclass(frozen=True)
class _Spec:
    """All that a program depends on."""

    num_tokens: int
    names: frozenset[str]
    num_captured: int
    num_keys: int | None
    edits: tuple[tuple[Hashable, int], ...]


class HookPrograms:
    """Compiles and calls the programs of steps with hooks.

    Args:
        programs: Of the model.
    """

    def __init__(self, programs: StepPrograms):
        self._programs = programs
        self._compiled: dict[_Spec, Any] = {}
        self._stacks: dict[Hashable, tuple[list[Any], Any]] = {}
        # Of the plan that was asked about last, which is the one that is run next.
        self._captured: tuple[StepPlan, tuple[tuple[CapturedRow, ...], np.ndarray]] | None = None

    def __len__(self) -> int:
        return len(self._compiled)

    @cached_property
    def points(self) -> dict[str, jax.ShapeDtypeStruct]:
        """All that can be captured: name → shape [T, ...] and dtype."""
        programs = self._programs
        layout = programs.config.layout(programs.config.token_buckets[0])

        def run(tap: Tap) -> jax.Array:
            zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
            packed = jnp.zeros(layout.size, jnp.int32)
            last_sampled = jnp.zeros(programs.config.max_num_seqs, jnp.int32)
            leaves, cache = zeros(programs.backbone.abstract), zeros(programs.abstract_cache)
            step = programs.backbone_step
            return step(layout, leaves, cache, packed, last_sampled, lambda batch: tap)[2]

        return hook_points(run, programs.vocab_size)

    def wanted(self, plan: StepPlan) -> bool:
        """Whether a plan needs one of these programs: not if it has no token to look at."""
        if all(row.request.hooks is None for row in plan.rows):
            return False
        edited = any(row.request.is_edited for row in plan.rows)
        return bool(self._captured_tokens(plan)[0]) or edited

    def forward(
        self, plan: StepPlan, T: int, cache: KVCache, packed: np.ndarray, last_sampled: jax.Array
    ) -> tuple[KVCache, jax.Array, jax.Array, Captured | None]:
        """Dispatch the backbone, as `StepPrograms.backbone_step` does, and what hooks add.

        DONATES cache.
        """
        rows, tokens = self._captured_tokens(plan)
        self._captured = None
        slots, stacks, edits = self._edits_of(plan, T)
        names = frozenset(name for row in rows for name in row.names)
        room = _bucket(len(tokens), T)
        if self._programs.config.deterministic:
            room = T  # logits of few tokens would be summed in another order
        spec = _Spec(T, names, room, self._num_keys(plan, names), edits)
        padded = np.zeros(spec.num_captured, np.int32)
        padded[: len(tokens)] = tokens
        leaves = (self._programs.backbone.leaves, self._programs.head.leaves)
        arguments = (leaves, cache, packed, last_sampled, padded, slots, stacks)
        if spec not in self._compiled:
            self._compiled[spec] = _aside(lambda: self.lower(spec, *arguments).compile())
        cache, sampled, hidden, arrays = self._compiled[spec](*arguments)
        return cache, sampled, hidden, Captured(arrays, rows) if rows else None

    def lower(self, spec: _Spec, *arguments: Any) -> jax.stages.Lowered:
        """Trace the program of a spec, for arguments like these."""
        layout = self._programs.config.layout(spec.num_tokens)
        captured = dict.fromkeys(spec.names, self._programs.whole)
        step = self._programs.jit_backbone(partial(self._step, layout, spec), captured)
        return step.lower(*arguments)

    def _step(
        self,
        layout: BatchLayout,
        spec: _Spec,
        leaves: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]],
        cache: KVCache,
        packed: jax.Array,
        last_sampled: jax.Array,
        tokens: jax.Array,
        slots: tuple[jax.Array, ...],
        stacks: tuple[Any, ...],
    ) -> tuple[KVCache, jax.Array, jax.Array, dict[str, jax.Array]]:
        taps: list[HookTap] = []

        def make_tap(batch: ForwardBatch) -> Tap:
            taps.append(
                HookTap(
                    spec.names,
                    positions=batch.positions,
                    edits=tuple(zip(stacks, slots, strict=True)),
                    tokens=tokens,
                    num_keys=spec.num_keys,
                )
            )
            return taps[0]

        step = self._programs.backbone_step
        cache, sampled, hidden = step(layout, leaves[0], cache, packed, last_sampled, make_tap)
        captured = taps[0].captured
        if "logits" in spec.names:
            captured["logits"] = self._programs.head(leaves[1])(hidden[tokens])
        return cache, sampled, hidden, captured

    def _edits_of(
        self, plan: StepPlan, T: int
    ) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...], tuple[tuple[Hashable, int], ...]]:
        """Return, for each structure of edits: tokens' slots [T], the stack, and its height."""
        groups: dict[Hashable, list[Any]] = {}
        placed: list[tuple[Hashable, int, int, int]] = []
        first = 0
        for row in plan.rows:
            end, hooks = first + row.num_scheduled_tokens, row.request.hooks
            if hooks is not None and hooks.edits:
                shape = structure(hooks.edits)
                group = groups.setdefault(shape, [])
                slot = next((i for i, e in enumerate(group) if e is hooks.edits), len(group))
                group[slot:] = group[slot:] or [hooks.edits]
                placed.append((shape, slot, first, end))
            first = end
        order = sorted(groups, key=repr)
        slots = {shape: np.full(T, -1, np.int32) for shape in order}
        for shape, slot, first, end in placed:
            slots[shape][first:end] = slot
        stacks = {shape: self._stack(shape, groups[shape]) for shape in order}
        heights = tuple((shape, self._height(groups[shape])) for shape in order)
        self._stacks = {shape: (groups[shape], stacks[shape]) for shape in order}
        return tuple(slots[s] for s in order), tuple(stacks[s] for s in order), heights

    def _captured_tokens(self, plan: StepPlan) -> tuple[tuple[CapturedRow, ...], np.ndarray]:
        if self._captured is None or self._captured[0] is not plan:
            self._captured = plan, _captured_tokens(plan)
        return self._captured[1]

    def _height(self, group: list[Any]) -> int:
        return bucket_of(len(group), self._programs.config.row_buckets)

    def _stack(self, shape: Hashable, group: list[Any]) -> Any:
        """Return edits of one structure as one, on the device; kept while the group stays."""
        known, stack = self._stacks.get(shape, ([], None))
        if len(known) == len(group) and all(a is b for a, b in zip(known, group, strict=True)):
            return stack
        padded = group + [group[-1]] * (self._height(group) - len(group))
        stacked = jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *padded)
        return jax.device_put(stacked, self._programs.whole)

    def _num_keys(self, plan: StepPlan, names: frozenset[str]) -> int | None:
        if not any(name.endswith("attn_weights") for name in names):
            return None
        longest = max(row.end for row in plan.rows)
        most = self._programs.config.max_model_len
        return min(most, max(64, 1 << (longest - 1).bit_length()))


def _captured_tokens(plan: StepPlan) -> tuple[tuple[CapturedRow, ...], np.ndarray]:
    """Return whose tokens are captured, and their indices in the step."""
    rows, tokens, first = [], [np.zeros(0, np.int32)], 0
    count = 0
    for row in plan.rows:
        request = row.request
        if request.hooks is not None and request.hooks.capture:
            hooks = request.hooks
            n = request.num_prompt_tokens
            positions = hooks.select(row.start, row.end, n)
            if len(positions):
                rows.append(CapturedRow(request.request_id, positions, count, hooks.capture))
                tokens.append(first + (positions - row.start))
                count += len(positions)
        first += row.num_scheduled_tokens
    return tuple(rows), np.concatenate(tokens)


def _bucket(count: int, T: int) -> int:
    """Return how many captured tokens a program has room for: none, few, or all."""
    if not count:
        return 0
    few = max(1, T // 16)
    return few if count <= few else T


def _aside(make: Callable[[], Any]) -> Any:
    """Call it in another thread: it is no surprise if this compiles, and not to be counted."""
    with ThreadPoolExecutor(1, "jaxinfer-hooks") as pool:
        return pool.submit(make).result()
