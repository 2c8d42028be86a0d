"""Several decode steps in one dispatch: a loop on the device that feeds each row its own tokens.

Pure functions of arrays, traced inside jit. Knows no request: how often a row may run and what ends
it stands in the limits that `jaxinfer.sampling_batch` packs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.batch import SampledTokens
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.kv_cache import KVCache, PagedAttend, write_token_ids
from jaxinfer.sampler import History, SamplingInputs, sample, sample_processed
from jaxinfer.selection import Shards
from pallas_kernels import RaggedBatch
from pallas_kernels.shapes import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Progress:
    """What one step of the loop hands to the next.

    Attributes:
        step: int32 [], steps done.
        cache: The pages.
        token_ids: int32 [B], each row's newest token; stays the last one once the row has ended.
        running: bool [B], rows that no token has ended.
        counts: int32 [B], tokens sampled.
        sampled: The results, [num_steps, B, ...] each.
        states: Those of logits processors, [B, ...] each; () without any.
    """

    step: Any
    cache: Any
    token_ids: Any
    running: Any
    counts: Any
    sampled: Any
    states: Any


def decode_loop(
    backbone: Callable[[Array, Array, PagedAttend], Array],
    head: Callable[[Array], Array],
    cache: KVCache,
    batch: ForwardBatch,
    token_ids: Int[Array, " B"],
    limits: Int[Array, "fields B"],
    inputs: SamplingInputs,
    *,
    num_steps: int,
    num_slots: tuple[int, ...],
    vocab_size: int,
    max_logprobs: int,
    shards: Shards | None,
    attend_over: Callable[[KVCache, tuple[RaggedBatch, ...], Array], PagedAttend],
    process: Callable[[Array, Any, SamplingInputs, History], tuple[Array, Any]] | None = None,
    states: Any = (),
) -> tuple[KVCache, SampledTokens, Int[Array, " B"], Any]:
    """Run each row until it reaches its limit or an end token, and the loop until none runs.

    A step is what the backbone and the sampler do in two programs for rows of one token; slots and
    positions follow from the page table and the step. A row that has ended writes nothing more, so
    its pages need reach no further than its limit.

    Args:
        backbone: (token_ids [B], positions [B], attend) → hidden states [B, D].
        head: Hidden states → logits [B, V].
        cache: Updated in place if it is donated.
        batch: One token a row, `token i` of row i; its slots and sequence lengths are not used.
        token_ids: The rows' newest tokens.
        limits: As packed by `SamplingPacker.pack_limits`.
        inputs: What the rows ask for; positions are counted here.
        num_steps: Static room for results, at least any row's limit.
        num_slots: By group, the slot of tokens that must not be written.
        vocab_size: V.
        max_logprobs: Static width of the alternatives.
        shards: How logits are divided among devices; None if they are not.
        attend_over: `PagedAttend` of a cache, rows by group and slots [num_groups, B].
        process: Logits processors: (logits [B, V], states, inputs, history) → (logits, states).
        states: Theirs before the first step, [B, ...] each.

    Returns:
        The cache; the results, [num_steps, B, ...] each; how many of them each row has, int32 [B];
        the states after the last of them.
        A row whose logits held a NaN is marked at the step behind its last token.
    """
    max_tokens, end_ids = limits[0], limits[1:]
    used = batch.positions >= 0

    def ends(token_ids: Array) -> Array:
        # No matter how long the output is: before `min_tokens` these cannot be sampled.
        return jnp.any(token_ids[None] == end_ids, axis=0)

    def alive(state: Progress) -> Array:
        return state.running & (state.step < max_tokens)

    def draw(logits: Array, state: Progress, cache: KVCache) -> tuple[SampledTokens, Any]:
        positions = batch.positions + state.step + 1  # of the tokens being sampled
        history = History(
            token_pages=cache.token_ids,
            page_table=batch.ragged[0].page_table,
            seq_lens=jnp.where(alive(state), positions, 0),
        )
        asked = dataclasses.replace(inputs, positions=positions)
        if process is None:
            sampled = sample(logits, asked, history, max_logprobs=max_logprobs, shards=shards)
            return sampled, state.states
        sampled, states = sample_processed(
            logits,
            asked,
            history,
            lambda x: process(x, state.states, asked, history),
            max_logprobs=max_logprobs,
            shards=shards,
        )
        return sampled, jax.tree.map(partial(_select, alive(state)), states, state.states)

    def advance(state: Progress) -> Progress:
        now = alive(state)
        positions = jnp.where(now, batch.positions + state.step, -1)
        slots = jnp.stack(
            [
                _slots(ragged.page_table, positions, cache.page_size, outside)
                for ragged, outside in zip(batch.ragged, num_slots, strict=True)
            ]
        )
        # A row that has ended reads a single key.
        seq_lens = jnp.where(now, positions + 1, used.astype(jnp.int32))
        ragged = tuple(ragged._replace(seq_lens=seq_lens) for ragged in batch.ragged)
        attend = attend_over(write_token_ids(state.cache, state.token_ids, slots[0]), ragged, slots)
        logits = head(backbone(state.token_ids, positions, attend))
        sampled, states = draw(logits, state, attend.cache)
        corrupted = sampled.corrupted & now
        newest = jnp.where(now & ~corrupted, sampled.token_ids, state.token_ids)
        ended = now & (corrupted | ends(newest))
        sampled = dataclasses.replace(sampled, corrupted=corrupted)
        return Progress(
            step=state.step + 1,
            cache=attend.cache,
            token_ids=newest,
            running=state.running & ~ended,
            counts=state.counts + (now & ~corrupted).astype(jnp.int32),
            sampled=jax.tree.map(
                partial(lax.dynamic_update_index_in_dim, index=state.step, axis=0),
                state.sampled,
                sampled,
            ),
            states=states,
        )

    start = Progress(
        step=jnp.int32(0),
        cache=cache,
        token_ids=token_ids,
        # The newest token may be one that the host has not seen, and the last.
        running=used & ~((batch.pending_rows >= 0) & ends(token_ids)),
        counts=jnp.zeros_like(token_ids),
        sampled=(),
        states=states,
    )
    logits = jax.ShapeDtypeStruct((*token_ids.shape, vocab_size), jnp.float32)
    room = jax.tree.map(
        lambda x: jnp.zeros((num_steps, *x.shape), x.dtype),
        jax.eval_shape(lambda x: draw(x, start, cache)[0], logits),
    )
    state = lax.while_loop(
        lambda state: jnp.any(alive(state)), advance, dataclasses.replace(start, sampled=room)
    )
    return state.cache, state.sampled, state.counts, state.states


def _select(rows: Array, new: Array, old: Array) -> Array:
    return jnp.where(rows.reshape(rows.shape + (1,) * (new.ndim - 1)), new, old)


def _slots(
    page_table: Int[Array, "B P"], positions: Int[Array, " B"], page_size: int, outside: int
) -> Int[Array, " B"]:
    """Return the slot of each row's token, `outside` for those at position -1."""
    pages = jnp.take_along_axis(page_table, jnp.maximum(positions, 0)[:, None] // page_size, axis=1)
    return jnp.where(positions >= 0, pages[:, 0] * page_size + positions % page_size, outside)
