"""The kernels of paged decode: what one program computes.

Each program keeps the running softmax of FlashAttention (arXiv:2205.14135, algorithm 1) over the
keys of one row, one key/value head and one split, for tokens of the row and all query heads that
share the key/value head.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kv_pages import product_dtype, value_dtype
from pallas_kernels.shapes import Array
from pallas_kernels.triton import backend
from pallas_kernels.triton.backend import load, store
from pallas_kernels.triton.decode_shape import DecodeShape, Row, Tile, iota

LOG2E = 1.4426950408889634
"""The softmax is taken to base 2: that is the exponential which the hardware has."""

NO_KEY = -1e30
"""Maximum of no scores. Finite, so that the difference of two is no NaN."""

MAX_FLOAT32_PART = 64
"""Numbers of a head in one product of float32, whose operands are split in registers: with more
they do not fit there."""

COMBINED = 16
"""Splits that are added up in one go. Fixed, and so is the order of all additions."""


def split_kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,  # [num_pages, K, page_size, H]
    k_scales_ref,  # [num_pages, K, page_size] or None
    v_scales_ref,  # [num_pages, K, page_size] or None
    table_ref,  # [B, P]
    seq_lens_ref,  # [B]
    starts_ref,  # [B + 1]
    num_rows_ref,  # [1]
    acc_ref,  # float32 [B, M, N, S, H], M tokens of a row
    max_ref,  # float32 [B, M, N, S]
    sum_ref,  # float32 [B, M, N, S]
    *,
    shape: DecodeShape,
) -> None:
    """Attend one row to the keys of one split of one head."""
    row, tile, head = _program(seq_lens_ref, starts_ref, num_rows_ref, shape)
    split = pl.program_id(2)
    start, end = row.split(split)
    pages = (k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref)
    acc, row_max, row_sum = _attend(row, tile, start, end, head, q_ref, *pages, shape=shape)
    d = iota(shape.padded_dim)
    # Nobody reads the parts of splits that a row does not reach.
    used = tile.used & (start < end)
    store(max_ref, (row.index, tile.tokens, tile.heads, split), row_max, mask=used)
    store(sum_ref, (row.index, tile.tokens, tile.heads, split), row_sum, mask=used)
    store(
        acc_ref,
        (row.index, tile.tokens[:, None], tile.heads[:, None], split, d[None, :]),
        acc,
        mask=used[:, None] & (d < shape.head_dim)[None, :],
    )


def whole_kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,  # [num_pages, K, page_size, H]
    k_scales_ref,  # [num_pages, K, page_size] or None
    v_scales_ref,  # [num_pages, K, page_size] or None
    table_ref,  # [B, P]
    seq_lens_ref,  # [B]
    starts_ref,  # [B + 1]
    num_rows_ref,  # [1]
    sinks_ref,  # [N] or None
    _,  # what `out_ref` overwrites, or None
    out_ref,  # [T, N, H]
    *,
    shape: DecodeShape,
) -> None:
    """Attend one row to all of its keys of one head, where there is one split."""
    row, tile, head = _program(seq_lens_ref, starts_ref, num_rows_ref, shape)
    start, end = row.first_block, row.end_block
    pages = (k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref)
    acc, row_max, row_sum = _attend(row, tile, start, end, head, q_ref, *pages, shape=shape)
    if shape.rows_are_tokens:
        # Tokens of no row are written, too: they get zeros.
        tile = Tile.of(jnp.int32(0), head, 1, shape)
    sinks = None if sinks_ref is None else load(sinks_ref, (tile.heads,), mask=tile.used)
    acc = acc * _final_scale(row_max, row_sum, sinks, shape)[:, None]
    d = iota(shape.padded_dim)
    store(
        out_ref,
        ((row.first_token + tile.tokens)[:, None], tile.heads[:, None], d[None, :]),
        acc.astype(out_ref.dtype),
        mask=tile.used[:, None] & (d < shape.head_dim)[None, :],
    )


def combine_kernel(
    acc_ref,  # float32 [B, M, N, S, H], M tokens of a row
    max_ref,  # float32 [B, M, N, S]
    sum_ref,  # float32 [B, M, N, S]
    seq_lens_ref,  # [B]
    starts_ref,  # [B + 1]
    num_rows_ref,  # [1]
    sinks_ref,  # [N] or None
    _,  # what `out_ref` overwrites, or None
    out_ref,  # [T, N, H]
    *,
    shape: DecodeShape,
) -> None:
    """Put the splits of one token and one query head together."""
    index, token = pl.program_id(0) // shape.max_query_len, pl.program_id(0) % shape.max_query_len
    head = pl.program_id(1)
    row = Row.read(index, seq_lens_ref, starts_ref, num_rows_ref, shape)
    in_row = token < row.num_tokens
    d = iota(shape.padded_dim)
    in_head = d < shape.head_dim

    def body(i, carry):
        acc, old_max, old_sum = carry
        s = i * COMBINED + iota(COMBINED)
        used = s < row.num_splits
        stats, part = (index, token, head, s), (index, token, head, s[:, None], d[None, :])
        part_max = jnp.where(used, load(max_ref, stats, mask=used), NO_KEY)
        part_sum = load(sum_ref, stats, mask=used)
        part = load(acc_ref, part, mask=used[:, None] & in_head[None, :])  # [COMBINED, H]
        new_max = jnp.maximum(old_max, part_max.max())
        weights, rescale = jnp.exp2(part_max - new_max), jnp.exp2(old_max - new_max)
        acc = acc * rescale + (part * weights[:, None]).sum(0)
        return acc, new_max, old_sum * rescale + (part_sum * weights).sum()

    num_steps = jnp.where(in_row, pl.cdiv(row.num_splits, COMBINED), 0)
    state = (jnp.zeros((shape.padded_dim,), jnp.float32), jnp.float32(NO_KEY), jnp.float32(0))
    acc, row_max, row_sum = lax.fori_loop(0, num_steps, body, state)
    # As vectors, since `reciprocal` takes no scalars.
    row_max, row_sum = (jnp.full_like(acc, x) for x in (row_max, row_sum))
    sink = None if sinks_ref is None else sinks_ref[head]
    acc = acc * _final_scale(row_max, row_sum, sink, shape)
    used = in_head if shape.rows_are_tokens else in_head & in_row
    store(out_ref, (row.first_token + token, head, d), acc.astype(out_ref.dtype), mask=used)


def _program(seq_lens_ref, starts_ref, num_rows_ref, shape: DecodeShape) -> tuple[Row, Tile, Any]:
    """Return the row, the tile of its tokens, and the key/value head of this program."""
    program, head = pl.program_id(0), pl.program_id(1)
    index, tile = program // shape.num_tiles, program % shape.num_tiles
    row = Row.read(index, seq_lens_ref, starts_ref, num_rows_ref, shape)
    return row, Tile.of(tile, head, row.num_tokens, shape), head


def _attend(
    row: Row,
    tile: Tile,
    start: Array,
    end: Array,
    head: Array,
    q_ref,
    k_ref,
    v_ref,
    k_scales_ref,
    v_scales_ref,
    table_ref,
    *,
    shape: DecodeShape,
) -> tuple[Array, Array, Array]:
    """Attend a row's tokens to the blocks [start, end) of one key/value head.

    Returns:
        Values summed with their weights [M, H], the maximum [M] that the weights are relative to,
        and the weights' sum [M], all float32.
    """
    d = iota(shape.padded_dim)
    in_head = (d < shape.head_dim)[None, :]
    dtype, v_dtype = (f(q_ref.dtype, k_ref.dtype) for f in (product_dtype, value_dtype))
    width = min(shape.padded_dim, MAX_FLOAT32_PART if dtype == jnp.float32 else shape.padded_dim)
    parts = [start + iota(width) for start in range(0, shape.padded_dim, width)]
    rows = ((row.first_token + tile.tokens)[:, None], tile.heads[:, None])
    queries = [
        load(
            q_ref,
            (*rows, part[None, :]),
            mask=tile.used[:, None] & (part < shape.head_dim)[None, :],
        ).astype(dtype)
        for part in parts
    ]  # [M, width] each
    positions = row.seq_len - row.num_tokens + tile.tokens

    def body(block, carry):
        acc, old_max, old_sum = carry
        s = block * shape.block_k + iota(shape.block_k)
        # Page ids, keys and values that no token sees are not read: they may be anything.
        seen = (s >= row.oldest) & (s < row.seq_len)
        pages = load(table_ref, (row.index, s // shape.page_size), mask=seen)
        pages, slots = jnp.clip(pages, 0, shape.num_pages - 1), s % shape.page_size
        slots_of = (pages[:, None], head, slots[:, None])
        scores = jnp.zeros((shape.padded_rows, shape.block_k), jnp.float32)
        for part, q in zip(parts, queries, strict=True):
            mask = seen[:, None] & (part < shape.head_dim)[None, :]
            k = load(k_ref, (*slots_of, part[None, :]), mask=mask).astype(dtype)  # [block_k, width]
            scores += backend.dot(q, k, trans_b=True, interpret=shape.interpret)
        scores *= shape.scale
        if k_scales_ref is not None:
            scores *= load(k_scales_ref, (pages, head, slots), mask=seen)[None, :]
        if shape.logit_softcap is not None:
            scores = shape.logit_softcap * jnp.tanh(scores / shape.logit_softcap)
        distance = positions[:, None] - s[None, :]
        visible = distance >= 0
        if shape.sliding_window is not None:
            visible &= distance < shape.sliding_window
        scores = jnp.where(visible, scores * LOG2E, -jnp.inf)  # [M, block_k]
        new_max = jnp.maximum(old_max, scores.max(1))
        weights = backend.exp2(scores - new_max[:, None], interpret=shape.interpret)
        rescale = jnp.exp2(old_max - new_max)
        new_sum = old_sum * rescale + weights.sum(1)
        if v_scales_ref is not None:
            weights *= load(v_scales_ref, (pages, head, slots), mask=seen)[None, :]
        v = load(v_ref, (*slots_of, d[None, :]), mask=seen[:, None] & in_head).astype(v_dtype)
        product = backend.dot(weights.astype(v_dtype), v, interpret=shape.interpret)
        return acc * rescale[:, None] + product, new_max, new_sum

    state = (
        jnp.zeros((shape.padded_rows, shape.padded_dim), jnp.float32),
        jnp.full((shape.padded_rows,), NO_KEY, jnp.float32),
        jnp.zeros((shape.padded_rows,), jnp.float32),
    )
    return lax.fori_loop(start, end, body, state)


def _final_scale(row_max: Array, row_sum: Array, sink: Array | None, shape: DecodeShape) -> Array:
    """Return what summed values are multiplied by; 0 keys give a finite number."""
    rescale: Array | float = 1.0
    if sink is not None:
        # One more score, whose value is zero.
        sink = sink.astype(jnp.float32) * LOG2E
        new_max = jnp.maximum(row_max, sink)
        rescale = jnp.exp2(row_max - new_max)
        row_sum = row_sum * rescale + jnp.exp2(sink - new_max)
    row_sum = jnp.where(row_sum > 0, row_sum, 1.0)
    return rescale * backend.reciprocal(row_sum, interpret=shape.interpret)
