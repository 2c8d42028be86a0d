"""Which request's processor states stand where: host bookkeeping around arrays on the device.

A request that has processors holds a slot from its first sampled token to its end. If all slots are
taken, one of a request that does not run now (it was preempted) comes to the host and goes back
when the request does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.batch import ScheduledRow
from jaxinfer.errors import InvalidRequestError
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.processing import ProcessorKind, States
from jaxinfer.request import Request

MAX_PROCESSORS = 16
"""Distinct processors of one engine: each is in every program of the set."""


@dataclass
class _Entry:
    """What is known of a live request.

    Attributes:
        request: Whose.
        kinds: Indices of its processors in the set.
        position: Of the token before which `leaves` is the state.
        leaves: By processor of the request, its state's leaves.
        slot: Where later states stand; None before the first token and while there is none.
    """

    request: Request
    kinds: tuple[int, ...]
    position: int
    leaves: list[list[np.ndarray]]
    slot: int | None = None


class ProcessorSlots:
    """The set of processors of an engine, and the states of live requests.

    Args:
        num_slots: Requests that may run at once.
        vocab_size: V.
        num_tokens: S, longest row of tokens that a processor is shown.
        put: Brings an array to the device.

    Attributes:
        kinds: The set, in the order in which processors are applied. It only grows.
        stored: On the device, [2, num_slots, ...] each: see `jaxinfer.processing.load_states`.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        num_tokens: int,
        put: Callable[[np.ndarray], jax.Array],
    ):
        self.num_slots = num_slots
        self.kinds: list[ProcessorKind] = []
        self.stored: States = ()
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._put = put
        self._entries: dict[str, _Entry] = {}
        self._free = list(range(num_slots))
        self._nothing: dict[int, States] = {}  # initial states of a step in which no row begins

    def __len__(self) -> int:
        """Live requests with processors that have been seen."""
        return len(self._entries)

    def add_kinds(self, processors: Sequence[LogitsProcessor]) -> bool:
        """Take up processors that the set does not have yet; return whether there were any.

        Raises:
            InvalidRequestError: One is faulty, or there would be too many.
        """
        new = []
        for processor in processors:
            kind, _ = ProcessorKind.of(processor)
            if kind not in self.kinds and kind not in new:
                kind.check(self._vocab_size, self._num_tokens)
                new.append(kind)
        if len(self.kinds) + len(new) > MAX_PROCESSORS:
            raise InvalidRequestError(
                f"logits_processors: this engine has compiled {len(self.kinds)} and takes at most"
                f" {MAX_PROCESSORS}; {new[-1].name} is one more. Define a function once, at module"
                " level, and put what changes into its state",
                "logits_processors",
            )
        for kind in new:
            self.kinds.append(kind)
            shapes = [((2, self.num_slots, *shape), dtype) for shape, dtype in kind.leaves]
            self.stored += (tuple(self._put(np.zeros(*form)) for form in shapes),)
        if new:
            self._nothing.clear()
        return bool(new)

    def named(self, name: str) -> list[ProcessorKind]:
        """Return the processors of the set that have this name."""
        return [kind for kind in self.kinds if kind.name == name]

    def uses(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether any row has a processor."""
        return any(row.request.params.processors for row in rows)

    def pack(self, rows: Sequence[ScheduledRow], B: int) -> tuple[np.ndarray, States]:
        """Return what `jaxinfer.processing.load_states` takes: `packed`, and `initial`.

        `packed[2 + i]` says which rows use processor i.
        """
        packed = np.zeros((2 + len(self.kinds), B), np.int32)
        packed[0] = self.num_slots
        planned = {row.request.request_id for row in rows}
        initial: tuple[tuple[np.ndarray, ...], ...] | None = None
        for i, row in enumerate(rows):
            if not row.request.params.processors:
                continue
            entry = self._entry(row.request)
            if entry.slot is None:
                entry.slot = self._free.pop() if self._free else self._evict(planned)
            packed[0, i] = entry.slot
            packed[[2 + k for k in entry.kinds], i] = 1
            if row.end == entry.position:
                packed[1, i] = 1
                initial = self._blank(B) if initial is None else initial
                for k, leaves in zip(entry.kinds, entry.leaves, strict=True):
                    for array, leaf in zip(initial[k], leaves, strict=True):
                        array[i] = leaf
        if initial is not None:
            return packed, initial
        if B not in self._nothing:
            self._nothing[B] = jax.tree.map(self._put, self._blank(B))
        return packed, self._nothing[B]

    def states_of(self, request: Request) -> list[list[np.ndarray]]:
        """Return the states before the request's next token, by processor and leaf."""
        entry = self._entry(request)
        position = request.num_tokens_with_pending
        if entry.slot is None or position == entry.position:
            return entry.leaves
        stored = jax.device_get([self.stored[k] for k in entry.kinds])
        return [
            [np.array(leaf[(position - 1) % 2, entry.slot]) for leaf in leaves] for leaves in stored
        ]

    def restore(self, request: Request, leaves: list[list[np.ndarray]]) -> None:
        """Let a request's next token find these states."""
        entry = self._entry(request)
        entry.position, entry.leaves = request.num_tokens_with_pending, leaves

    def forget(self, request_id: str) -> None:
        """Let others have the slot of a finished request; unknown ids are fine."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.slot is not None:
            self._free.append(entry.slot)

    def _entry(self, request: Request) -> _Entry:
        entry = self._entries.get(request.request_id)
        # Ids may be used again; the object tells whether it is the same request.
        if entry is None or entry.request is not request:
            self.forget(request.request_id)
            parts = [ProcessorKind.of(p) for p in request.params.processors]
            entry = _Entry(
                request=request,
                kinds=tuple(self.kinds.index(kind) for kind, _ in parts),
                position=request.num_prompt_tokens,
                leaves=[leaves for _, leaves in parts],
            )
            self._entries[request.request_id] = entry
        return entry

    def _evict(self, planned: set[str]) -> int:
        """Take the slot of a request that this step does not concern, and keep what stood there."""
        victims = (e for e in self._entries.values() if e.slot is not None)
        victim = next(e for e in victims if e.request.request_id not in planned)
        slot = victim.slot
        assert slot is not None
        leaves = self.states_of(victim.request)
        victim.position, victim.leaves = victim.request.num_tokens_with_pending, leaves
        victim.slot = None
        return slot

    def _blank(self, B: int) -> tuple[tuple[np.ndarray, ...], ...]:
        return tuple(
            tuple(np.zeros((B, *shape), dtype) for shape, dtype in kind.leaves)
            for kind in self.kinds
        )
