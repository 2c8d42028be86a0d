"""Logits processors on the device: pure functions of arrays, traced into the sampler.

Knows no request and no engine: which rows use which function, and in what state, stands in arrays
that `jaxinfer.processor_slots` packs. Each function is written for one row and mapped over the
batch; rows that do not use it keep their logits bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.errors import InvalidRequestError
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.sampler import History, SamplingInputs
from pallas_kernels.shapes import Array

# Of each processor on each row: the leaves of its state.
type States = tuple[tuple[Any, ...], ...]

_OWN_KEYS = 0x80000000  # folded into a row's seed: no position gets there


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Row:
    """What a processor may know of its row besides the logits.

    Attributes:
        token_ids: int32 [S], prompt and output so far, -1 behind them. S is the longest sequence
            that the engine serves, rounded up to pages.
        num_tokens: int32 [], how many those are.
        num_prompt_tokens: int32 [], how many of them are the prompt.
        key: A random key of its own for this request, processor and position.
    """

    token_ids: Any
    num_tokens: Any
    num_prompt_tokens: Any
    key: Any


@dataclass(frozen=True)
class ProcessorKind:
    """What is compiled of a processor: its function and the form of its state.

    Attributes:
        name: For people.
        function: For one row.
        takes_row: Whether it has a third argument.
        treedef: Of the state.
        leaves: Shape and dtype of each leaf of the state.
    """

    name: str
    function: Callable[..., tuple[Any, Any]]
    takes_row: bool
    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @classmethod
    def of(cls, processor: LogitsProcessor) -> tuple[ProcessorKind, list[np.ndarray]]:
        """Return a processor's kind, and its state's leaves as arrays.

        Raises:
            InvalidRequestError: The state is no pytree, or a leaf of it no number or array of them.
        """
        try:
            leaves, treedef = jax.tree.flatten(processor.state)
        except ValueError as error:  # such as a dict whose keys have no order
            raise InvalidRequestError(
                f"logits_processors: the state of {processor.name} is no pytree: {error}",
                "logits_processors",
            ) from error
        arrays = [_array(leaf, processor.name) for leaf in leaves]
        kind = cls(
            name=processor.name,
            function=processor.function,
            takes_row=processor.takes_row,
            treedef=treedef,
            leaves=tuple((a.shape, a.dtype) for a in arrays),
        )
        return kind, arrays

    def check(self, vocab_size: int, num_tokens: int) -> None:
        """Trace the function, so that what is wrong with it is the caller's error, not a step's.

        Raises:
            InvalidRequestError: It fails, or returns something else than it was given.
        """
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        row = Row(
            token_ids=jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
            num_tokens=scalar,
            num_prompt_tokens=scalar,
            key=jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")),
        )
        logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
        leaves = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.leaves)
        try:
            found = jax.eval_shape(self.run, logits, leaves, row)
        except Exception as error:
            raise InvalidRequestError(
                f"logits_processors: {self.name} cannot be traced: {type(error).__name__}: {error}",
                "logits_processors",
            ) from error
        given = jax.tree.map(_form, (logits, leaves))
        if jax.tree.map(_form, found) != given:
            raise InvalidRequestError(
                f"logits_processors: {self.name} must return logits and state in the shapes and"
                f" dtypes it is given, {given}, got {jax.tree.map(_form, found)}",
                "logits_processors",
            )

    def run(self, logits: Array, leaves: tuple[Array, ...], row: Row) -> tuple[Array, Any]:
        """Call the function on one row; logits [V]."""
        state = jax.tree.unflatten(self.treedef, leaves)
        extra = (row,) if self.takes_row else ()
        logits, state = self.function(logits, state, *extra)
        leaves_out, treedef = jax.tree.flatten(state)
        if treedef != self.treedef:
            raise TypeError(f"the state was {self.treedef} and is {treedef}")
        return logits, tuple(jnp.asarray(leaf) for leaf in leaves_out)


def process(
    kinds: Sequence[ProcessorKind],
    logits: Array,
    states: States,
    uses: Array,
    inputs: SamplingInputs,
    history: History,
) -> tuple[Array, States]:
    """Return the logits [B, V] and states after all processors, in their order.

    Args:
        kinds: n processors.
        logits: float32 [B, V], after bias, mask and penalties.
        states: By processor and leaf, [B, ...].
        uses: bool [n, B], which rows have which processor.
        inputs: Whose seeds and positions give the keys.
        history: The tokens so far of the rows that look at them.
    """
    ruled_out = logits == -jnp.inf
    token_ids = _tokens(history) if any(kind.takes_row for kind in kinds) else None
    after = []
    for i, (kind, leaves) in enumerate(zip(kinds, states, strict=True)):
        with jax.named_scope(kind.function.__name__ if hasattr(kind.function, "__name__") else "f"):
            row = _rows(i, token_ids, inputs, history)
            new_logits, new_leaves = lax.cond(
                jnp.any(uses[i]),
                lambda x, s, r, k=kind: jax.vmap(k.run)(x, s, r),
                lambda x, s, r: (x, s),
                logits,
                leaves,
                row,
            )
        logits = jnp.where(uses[i][:, None], new_logits, logits)
        after.append(
            tuple(select_rows(uses[i], n, o) for n, o in zip(new_leaves, leaves, strict=True))
        )
    return jnp.where(ruled_out, -jnp.inf, logits), tuple(after)


def select_rows(rows: Array, new: Array, old: Array) -> Array:
    """Return `new` where `rows` [B] says so, `old` elsewhere; both [B, ...]."""
    return jnp.where(rows.reshape(rows.shape + (1,) * (new.ndim - 1)), new, old)


def load_states(stored: States, initial: States, packed: Array, positions: Array) -> States:
    """Return each row's states [B, ...] before the token at `positions` is sampled.

    Slots hold two states, of even and of odd positions. The state after the token at p is kept
    where p's parity says and read back by the token at p + 1; so a token that is sampled again,
    because its request was preempted while it was in flight, finds the state it found before.

    Args:
        stored: [2, num_slots, ...] each.
        initial: [B, ...] each, for rows that begin.
        packed: int32 [2 + n, B]: slots, whether the row begins, and which rows use what.
        positions: int32 [B].
    """
    slots, begins = packed[0], packed[1] != 0

    def load(kept: Array, fresh: Array) -> Array:
        found = kept.at[(positions - 1) % 2, slots].get(mode="clip")
        return select_rows(begins, fresh, found)

    return jax.tree.map(load, stored, initial)


def store_states(stored: States, states: States, packed: Array, positions: Array) -> States:
    """Keep each row's states after the token at `positions` was sampled."""
    slots = packed[0]  # that of rows without processors is outside

    def store(kept: Array, state: Array) -> Array:
        return kept.at[positions % 2, slots].set(state, mode="drop")

    return jax.tree.map(store, stored, states)


def _tokens(history: History) -> Array:
    """Return int32 [B, S]: every row's tokens so far, -1 behind them."""
    B, P = history.page_table.shape
    page_size = history.token_pages.shape[1]
    pages = history.token_pages.at[history.page_table].get(mode="clip")  # [B, P, page_size]
    token_ids = pages.reshape(B, P * page_size)
    live = jnp.arange(P * page_size, dtype=jnp.int32)[None] < history.seq_lens[:, None]
    return jnp.where(live, token_ids, -1)


def _rows(index: int, token_ids: Array | None, inputs: SamplingInputs, history: History) -> Row:
    """Return the rows, one axis more in front of everything."""
    keys = jax.random.wrap_key_data(inputs.seeds, impl="threefry2x32")

    def own(key: Array, position: Array) -> Array:
        own_seed = jax.random.fold_in(key, np.uint32(_OWN_KEYS + index))
        return jax.random.fold_in(own_seed, position)

    B = inputs.positions.shape[0]
    return Row(
        token_ids=jnp.zeros((B, 0), jnp.int32) if token_ids is None else token_ids,
        num_tokens=history.seq_lens,
        num_prompt_tokens=inputs.prompt_lens,
        key=jax.vmap(own)(keys, inputs.positions),
    )


def _array(leaf: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError):  # a key of jax.random, or rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf" and array.dtype != jnp.bfloat16:
        raise InvalidRequestError(
            f"logits_processors: the state of {name} must hold numbers, got {type(leaf).__name__}",
            "logits_processors",
        )
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype.kind in "iu" and (narrow != array).any():
        raise InvalidRequestError(
            f"logits_processors: the state of {name} has an integer that {narrow.dtype} does not "
            "hold; take a float, or two integers",
            "logits_processors",
        )
    return narrow


def _form(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
