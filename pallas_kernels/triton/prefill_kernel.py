"""The kernel of paged prefill: what one program computes.

A tile visits the keys that any of its tokens sees, `block_k` at a time, with the running softmax of
FlashAttention (arXiv:2205.14135, algorithm 1):

    keys of a sequence   0 ...... [start ........ first position ........ end) ......
    visited                       rounded down to block_k               end is the last token's

Everything outside of [start, end) is neither computed nor read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.shapes import Array
from pallas_kernels.triton import backend
from pallas_kernels.triton.prefill_shape import PrefillShape

LOG2E = 1.4426950408889634
"""The softmax is taken to base 2: that is the exponential which the hardware has."""

UNSEEN = -(2.0**100)
"""Score of a key that is not visible. Finite, so that the difference of two is no NaN; what rows
without a visible key gather is scaled to zero by their first visible one. A power of two, so that
its product with a factor is exact: GPUs fuse that with the subtraction of the maximum, and of
-1e30 * 0.18 there remained up to 1e22, whose exponential is infinite."""


def prefill_kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,
    k_scales_ref,  # [num_pages, K, page_size] or None
    v_scales_ref,
    sinks_ref,  # [N] or None
    table_ref,  # [B, P]
    tiles_ref,  # [4, num_tiles]
    num_tiles_ref,  # [1]
    _,  # `out_ref`
    out_ref,  # [T, N, H]
    *,
    shape: PrefillShape,
):
    """Attend the rows of every so many-th tile to their keys of one KV head."""
    refs = (q_ref, k_ref, v_ref, k_scales_ref, v_scales_ref, sinks_ref, table_ref, tiles_ref)
    # The last tiles of a sequence have the most keys: they come first.
    last = num_tiles_ref[0] - 1 - pl.program_id(0)
    heads = pl.program_id(1)

    def body(i, _):
        _attend_tile(last - i * shape.num_programs, heads, refs, out_ref, shape)

    lax.fori_loop(0, (last + shape.num_programs) // shape.num_programs, body, None)


def _attend_tile(
    tile: Array, heads: Array, refs: tuple[Any, ...], out_ref: Any, shape: PrefillShape
) -> None:
    """Attend one tile's rows to their keys of one KV head.

    `heads` numbers the KV heads, or where their query heads need several tiles, those.
    """
    q_ref, k_ref, v_ref, k_scales_ref, v_scales_ref, sinks_ref, table_ref, tiles_ref = refs
    block_q, group = shape.tiles.block_q, shape.group
    kv_head, head_block = heads // shape.head_blocks, heads % shape.head_blocks
    row, first, count, position = (tiles_ref[i, tile] for i in range(4))

    m = _iota(block_q)
    token = m // shape.heads_per_tile
    head = head_block * shape.heads_per_tile + m % shape.heads_per_tile  # in the group
    used = (token < count) & (head < group)
    head = kv_head * group + head
    start = jnp.int32(0)
    if shape.sliding_window is not None:
        start = jnp.maximum(position - shape.sliding_window + 1, 0)
    # More keys than the table holds would lead behind its end.
    end = jnp.minimum(position + count, shape.max_keys)

    queries = tuple(
        backend.load(q_ref, _rows(first + token, head, part), mask=_mask(used, part, shape))
        .astype(shape.product_dtype)
        for part in shape.parts
    )  # fmt: skip
    row_max = jnp.full((block_q,), UNSEEN, jnp.float32)
    row_sum = jnp.zeros((block_q,), jnp.float32)
    if sinks_ref is not None:
        # As if a key with this score and no value had been seen first.
        row_max = backend.load(sinks_ref, (head,), mask=used).astype(jnp.float32) * LOG2E
        row_sum = jnp.ones((block_q,), jnp.float32)
    state = (tuple(jnp.zeros(x.shape, jnp.float32) for x in queries), row_max, row_sum)
    attend = partial(
        _attend_block,
        queries=queries,
        positions=position + token,
        row=row,
        kv_head=kv_head,
        start=start,
        end=end,
        refs=(k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref),
        shape=shape,
    )
    block_k = shape.tiles.block_k
    block = start // block_k
    if shape.sliding_window is None:
        # All tokens see all keys up to the first token's own: most blocks need no mask.
        block = jnp.minimum(position + 1, end) // block_k
        state = lax.fori_loop(0, block, partial(attend, masked=False), state)
    end_block = pl.cdiv(end, block_k)
    accs, _, row_sum = lax.fori_loop(block, end_block, partial(attend, masked=True), state)
    inverse = backend.reciprocal(jnp.where(row_sum > 0, row_sum, 1.0), interpret=shape.interpret)
    for part, acc in zip(shape.parts, accs, strict=True):
        value = (acc * inverse[:, None]).astype(out_ref.dtype)
        index, mask = _rows(first + token, head, part), _mask(used, part, shape)
        backend.store(out_ref, index, value, mask=mask)


def _attend_block(
    block,
    carry,
    *,
    queries,
    positions,
    row,
    kv_head,
    start,
    end,
    refs,
    shape: PrefillShape,
    masked: bool,
):
    """Add `block_k` keys to the running softmax: one step of the inner loop.

    With `masked` some tokens do not see some of the keys, else all see all.
    """
    k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref = refs
    accs, old_max, old_sum = carry
    key = block * shape.tiles.block_k + _iota(shape.tiles.block_k)
    # Page ids, keys and values that no token of the tile sees are not read: they may be anything.
    seen = (key >= start) & (key < end) if masked else None
    page = backend.load(table_ref, (row, key >> shape.page_bits), mask=seen)
    page = jnp.clip(page, 0, shape.num_pages - 1)
    slot = key & (shape.page_size - 1)

    scores = jnp.zeros((shape.tiles.block_q, shape.tiles.block_k), jnp.float32)
    for part, q in zip(shape.parts, queries, strict=True):
        index = (page[:, None], kv_head, slot[:, None], _columns(part))
        k = backend.load(k_ref, index, mask=_mask(seen, part, shape))
        k = k.astype(shape.product_dtype)
        scores += backend.dot(q, k, trans_b=True, interpret=shape.interpret)
    if k_scales_ref is not None:
        scores *= backend.load(k_scales_ref, (page, kv_head, slot), mask=seen)[None, :]
    scores, factor = _capped(scores, shape)
    if masked:
        distance = positions[:, None] - key[None, :]
        visible = distance >= 0
        if shape.sliding_window is not None:
            visible &= distance < shape.sliding_window
        scores = jnp.where(visible, scores, UNSEEN)

    row_max = jnp.maximum(old_max, scores.max(1) * factor)
    weights = backend.exp2(scores * factor - row_max[:, None], interpret=shape.interpret)
    rescale = backend.exp2(old_max - row_max, interpret=shape.interpret)
    row_sum = old_sum * rescale + weights.sum(1)
    if v_scales_ref is not None:
        weights *= backend.load(v_scales_ref, (page, kv_head, slot), mask=seen)[None, :]
    weights = weights.astype(shape.value_dtype)
    new = []
    for part, acc in zip(shape.parts, accs, strict=True):
        index = (page[:, None], kv_head, slot[:, None], _columns(part))
        v = backend.load(v_ref, index, mask=_mask(seen, part, shape))
        product = backend.dot(weights, v.astype(shape.value_dtype), interpret=shape.interpret)
        new.append(acc * rescale[:, None] + product)
    return tuple(new), row_max, row_sum


def _capped(scores: Array, shape: PrefillShape) -> tuple[Array, float]:
    """Bound the scores if asked to; they still have to be multiplied by the factor returned.

    The factor scales them and turns them to base 2. It is left to the exponent, where it is part
    of one multiply-add.
    """
    cap = shape.logit_softcap
    if cap is None:
        return scores, shape.scale * LOG2E
    # tanh(x) = 1 - 2 / (1 + exp(2 x)): ten times as fast as the library's, and off by 1e-7.
    power = backend.exp2(scores * (2 * LOG2E * shape.scale / cap), interpret=shape.interpret)
    return 1 - 2 * backend.reciprocal(1 + power, interpret=shape.interpret), cap * LOG2E


def _rows(tokens: Array, heads: Array, part: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Index [rows, columns] of an array [T, N, H]."""
    return tokens[:, None], heads[:, None], _columns(part)


def _columns(part: tuple[int, int]) -> Array:
    start, width = part
    return (start + _iota(width))[None, :]


def _mask(rows: Array | None, part: tuple[int, int], shape: PrefillShape) -> Array | None:
    """Where both the row (None: all) and the column exist; None if all of them do."""
    start, width = part
    columns = _columns(part) < shape.head_dim if start + width > shape.head_dim else None
    if rows is None:
        return columns
    rows = jnp.broadcast_to(rows[:, None], (rows.shape[0], width))
    return rows if columns is None else rows & columns


def _iota(n: int) -> Array:
    return lax.iota(jnp.int32, n)
