"""Paged attention in plain jnp: the reference, and what runs where there is no kernel.

Memory is linear and no shape depends on how long the sequences are: keys are visited in blocks by a
loop whose trip count is read from the batch, with the running softmax of FlashAttention
(arXiv:2205.14135, algorithm 1). Only pages in use are read.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_pages import product_dtype, value_dtype
from pallas_kernels.ragged_batch import RaggedBatch, tile_starts
from pallas_kernels.shapes import Array, Bool, Float, Int

BLOCK_K = 256
"""Keys per step of the inner loop. Also fixes the order of summation, so that a row's result does
not depend on how long its neighbours are."""

BLOCK_ROWS = 8
"""One-token rows computed side by side."""

BLOCK_Q = 64
"""Consecutive tokens of one row computed side by side."""

PADDING = max(BLOCK_ROWS, BLOCK_Q)


def xla_paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "num_pages K page_size H"] | Int[Array, "num_pages K page_size H"],
    v_pages: Float[Array, "num_pages K page_size H"] | Int[Array, "num_pages K page_size H"],
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Float[Array, "num_pages K page_size"] | None = None,
    v_scales: Float[Array, "num_pages K page_size"] | None = None,
) -> Float[Array, "T N H"]:
    """Return what `pallas_kernels.paged_attention` promises.

    For one row of S keys and one token at position p:

        scores = softcap(q @ k.T * scale)
        out = softmax(where((p - window < arange(S)) & (arange(S) <= p), scores, -inf)) @ v

    Sinks are one more score in the softmax, of a key whose value is 0. Scales of keys multiply the
    scores, scales of values the weights: that is the same as scaling the vectors, and cheaper.
    """
    T, N, H = q.shape
    K = k_pages.shape[1]
    attend = partial(
        _attend_block,
        k_pages=k_pages,
        v_pages=v_pages,
        k_scales=k_scales,
        v_scales=v_scales,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(K, N // K),
    )
    # A tile may reach over the end of the packed tokens: pad once, cut at the end.
    padding = ((0, PADDING), (0, 0), (0, 0), (0, 0))
    q_padded = jnp.pad(q.reshape(T, K, N // K, H), padding)  # [T', K, G, H]
    out = jnp.zeros_like(q_padded)

    with jax.named_scope("decode_rows"):
        out = _decode_rows(q_padded, out, batch, attend)
    if T > 1:
        with jax.named_scope("chunk_tiles"):
            out = _chunk_tiles(q_padded, out, batch, attend)
    return out[:T].reshape(T, N, H)


def _decode_rows(q: Array, out: Array, batch: RaggedBatch, attend) -> Array:
    """Fill `out` for the one-token rows, `BLOCK_ROWS` rows at a time."""
    B, _ = batch.page_table.shape
    R = min(BLOCK_ROWS, B, q.shape[0] - PADDING)

    def body(i, out):
        # The last group may start early and compute some rows twice, to the same result.
        first = jnp.minimum(i * R, B - R)
        rows = lambda x: lax.dynamic_slice_in_dim(x, first, R)  # noqa: E731
        row_ids = first + jnp.arange(R, dtype=jnp.int32)
        seq_lens = jnp.where(row_ids < batch.num_decode_rows, rows(batch.seq_lens), 0)
        tile = attend(
            rows(q)[:, None],  # [R, 1, K, G, H]
            page_table=rows(batch.page_table),
            positions=seq_lens[:, None] - 1,
        )[:, 0]
        tile = jnp.where((seq_lens > 0)[:, None, None, None], tile, rows(out))
        return lax.dynamic_update_slice_in_dim(out, tile, first, 0)

    return lax.fori_loop(0, -(-batch.num_decode_rows // R), body, out)


def _chunk_tiles(q: Array, out: Array, batch: RaggedBatch, attend) -> Array:
    """Fill `out` for the rows longer than one token, one tile of `BLOCK_Q` tokens at a time."""
    starts = tile_starts(batch, BLOCK_Q)

    def body(tile, out):
        row = jnp.searchsorted(starts, tile, side="right") - 1
        first = batch.query_start_loc[row] + (tile - starts[row]) * BLOCK_Q
        end = batch.query_start_loc[row + 1]
        tokens = first + jnp.arange(BLOCK_Q, dtype=jnp.int32)
        positions = jnp.where(tokens < end, batch.seq_lens[row] - (end - tokens), -1)
        new = attend(
            lax.dynamic_slice_in_dim(q, first, BLOCK_Q)[None],  # [1, BLOCK_Q, K, G, H]
            page_table=batch.page_table[row][None],
            positions=positions[None],
        )[0]
        # Rows stand in order, so what a tile spills over its end the next tile overwrites.
        return lax.dynamic_update_slice_in_dim(out, new, first, 0)

    return lax.fori_loop(0, starts[-1], body, out)


def _attend_block(
    q: Float[Array, "R Q K G H"],
    *,
    page_table: Int[Array, "R P"],
    positions: Int[Array, "R Q"],
    k_pages: Array,
    v_pages: Array,
    k_scales: Float[Array, "num_pages K page_size"] | None,
    v_scales: Float[Array, "num_pages K page_size"] | None,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "R Q K G H"]:
    """Attend R rows × Q tokens to their pages; tokens at position -1 give zeros."""
    R, Q, K, G, H = q.shape
    _, P = page_table.shape
    page_size = k_pages.shape[2]
    pages_per_block = max(1, BLOCK_K // page_size)
    block_k = pages_per_block * page_size
    # The last block may reach over the table's end; the pages read there are masked.
    page_table = jnp.pad(page_table, ((0, 0), (0, -P % pages_per_block)))
    queries = jnp.moveaxis(q, 1, 3).reshape(R, K, G * Q, H)
    dtype, v_dtype = (f(q.dtype, k_pages.dtype) for f in (product_dtype, value_dtype))
    queries = queries.astype(dtype)
    query_positions = jnp.tile(positions, (1, G))  # [R, G * Q]
    first, end = _key_blocks(positions, block_k, sliding_window)

    def body(block, carry):
        out, row_max, row_sum = carry
        pages = lax.dynamic_slice_in_dim(page_table, block * pages_per_block, pages_per_block, 1)
        k = _gather(k_pages, pages).astype(dtype)  # [R, K, block_k, H]
        v = _gather(v_pages, pages).astype(v_dtype)
        key_positions = block * block_k + jnp.arange(block_k, dtype=jnp.int32)
        visible = _visible(query_positions, key_positions, sliding_window)[:, None]
        scores = jnp.einsum("RKMH,RKSH->RKMS", queries, k, preferred_element_type=jnp.float32)
        # Not of the queries: bfloat16 would round them, and the scale itself, by up to 0.4 %.
        scores *= scale
        if k_scales is not None:
            scores *= _gather(k_scales[..., None], pages)[:, :, None, :, 0]
        if logit_softcap is not None:
            scores = logit_softcap * jnp.tanh(scores / logit_softcap)
        scores = jnp.where(visible, scores, -jnp.inf)  # [R, K, G*Q, block_k]
        new_max = jnp.maximum(row_max, scores.max(-1))
        # Rows that have seen no key yet keep -inf; subtracting 0 there avoids inf - inf.
        shift = jnp.where(jnp.isneginf(new_max), 0.0, new_max)
        weights = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(row_max - shift)
        # A page's unused slots may hold anything, NaN included, and 0 * NaN is NaN.
        seen = visible.any(2)[..., None]
        v = jnp.where(seen, v, jnp.zeros((), v_dtype))
        new_sum = row_sum * rescale + weights.sum(-1)
        if v_scales is not None:
            scales = jnp.where(seen, _gather(v_scales[..., None], pages), 0.0)
            weights *= jnp.swapaxes(scales, 2, 3)
        product = jnp.einsum(
            "RKMS,RKSH->RKMH", weights.astype(v_dtype), v, preferred_element_type=jnp.float32
        )
        return out * rescale[..., None] + product, new_max, new_sum

    state = (
        jnp.zeros((R, K, G * Q, H), jnp.float32),
        jnp.full((R, K, G * Q), -jnp.inf, jnp.float32),
        jnp.zeros((R, K, G * Q), jnp.float32),
    )
    if sinks is not None:
        # As if a key with this score and no value had been seen first.
        seen = jnp.broadcast_to(jnp.repeat(sinks, Q, axis=1)[None], (R, K, G * Q))
        state = (state[0], seen, jnp.ones_like(seen))
    out, _, row_sum = lax.fori_loop(first, end, body, state)
    out = out / jnp.where(row_sum > 0, row_sum, 1.0)[..., None]
    return jnp.moveaxis(out.reshape(R, K, G, Q, H), 3, 1).astype(q.dtype)


def _key_blocks(
    positions: Int[Array, "R Q"], block_k: int, sliding_window: int | None
) -> tuple[Array, Array]:
    """The half-open range of key blocks that any of the tokens can see."""
    end = positions.max() // block_k + 1
    if sliding_window is None:
        return jnp.zeros((), jnp.int32), end
    oldest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions))
    return jnp.minimum(jnp.maximum(oldest - sliding_window + 1, 0) // block_k, end), end


def _visible(
    query_positions: Int[Array, "R M"], key_positions: Int[Array, " S"], sliding_window: int | None
) -> Bool[Array, "R M S"]:
    distance = query_positions[:, :, None] - key_positions[None, None, :]
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)


def _gather(pages: Array, page_ids: Int[Array, "R n"]) -> Array:
    """Collect pages [num_pages, K, page_size, H] side by side: [R, K, S, H].

    Ids are clamped: slots behind the last page may hold anything.
    """
    R, n = page_ids.shape
    _, K, page_size, H = pages.shape
    block = pages.at[page_ids].get(mode="clip")  # [R, n, K, page_size, H]
    return jnp.moveaxis(block, 2, 1).reshape(R, K, n * page_size, H)
