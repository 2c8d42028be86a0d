"""Prefill over pages: chunks of many sequences, packed, each attending to all of its pages.

Knows rows, pages and tiles; knows nothing of devices. One source for every GPU that Pallas' Triton
lowering has. Decides how the work is cut up; what is then computed is `prefill_kernel`.

A tile is up to `block_q` rows, the query tokens of one chunk times the query heads that share a KV
head, so that keys are read once for all of them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pages import product_dtype, value_dtype
from pallas_kernels.ragged_batch import RaggedBatch, tile_starts
from pallas_kernels.shapes import Array, Float, Int
from pallas_kernels.tiles import PrefillTiles
from pallas_kernels.triton import backend
from pallas_kernels.triton.prefill_kernel import prefill_kernel
from pallas_kernels.triton.prefill_shape import PrefillShape, tokens_per_tile

NUM_MULTIPROCESSORS = 148
"""Of the largest GPU, a B200."""


def paged_prefill(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "num_pages K page_size H"] | Int[Array, "num_pages K page_size H"],
    v_pages: Float[Array, "num_pages K page_size H"] | Int[Array, "num_pages K page_size H"],
    batch: RaggedBatch,
    out: Float[Array, "T N H"] | None = None,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Float[Array, "num_pages K page_size"] | None = None,
    v_scales: Float[Array, "num_pages K page_size"] | None = None,
    tiles: PrefillTiles,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Return attention of the tokens of rows behind `num_decode_rows`, in `out`.

    The same as `pallas_kernels.paged_attention` for these rows. Pages are read in place, and only
    those that a row's tokens see.

    Args:
        q: Queries, packed as `batch` says.
        k_pages: Keys by page: a float type, or int8 or float8_e4m3fn with scales.
        v_pages: Values by page.
        batch: Which tokens and pages belong together.
        out: What to return for all other tokens; None for zeros.
        scale: Multiplies the scores; positive.
        sliding_window: Keys visible to a token, itself included; None for all.
        logit_softcap: Scores become `cap * tanh(score / cap)`.
        sinks: Per head, a score that takes part in the softmax with a value of zero.
        k_scales: float32; each key is the stored one times its scale.
        v_scales: float32; each value is the stored one times its scale.
        tiles: Sizes of the blocks.
        interpret: Run on any device, slowly, for tests.

    Returns:
        [T, N, H] in q's dtype.

    Raises:
        ValueError: The scale is not positive.
        NotImplementedError: The pages of a layer are so many that offsets into them overflow.
    """
    if scale <= 0:
        raise ValueError(f"{scale=} must be positive: the largest score must stay the largest")
    backend.check_offsets(k_pages, v_pages)
    T, N, H = q.shape
    num_pages, K, page_size, _ = k_pages.shape
    B, P = batch.page_table.shape
    group = N // K
    tokens = tokens_per_tile(group, tiles.block_q)
    num_heads = K * -(-group // tiles.block_q)
    shape = PrefillShape(
        group=group,
        head_dim=H,
        page_size=page_size,
        num_pages=num_pages,
        max_keys=P * page_size,
        num_programs=_num_programs(T, B, num_heads, tokens),
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        product_dtype=product_dtype(q.dtype, k_pages.dtype),
        value_dtype=value_dtype(q.dtype, v_pages.dtype),
        tiles=tiles,
        interpret=interpret,
    )
    # Each row leaves less than one tile unfilled.
    num_tiles = T // tokens + min(B, T)
    inputs = (q, k_pages, v_pages, k_scales, v_scales, sinks, batch.page_table)
    inputs = (*inputs, *_tile_table(batch, tokens, num_tiles))
    out = jnp.zeros_like(q) if out is None else out
    return backend.call(
        partial(prefill_kernel, shape=shape),
        name="paged_prefill",
        # Tiles of one head stand side by side, since they read the same keys.
        grid=(shape.num_programs, num_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        input_output_aliases={len(jax.tree.leaves(inputs)): 0},
        interpret=interpret,
    )(*inputs, out)


def _num_programs(T: int, B: int, num_heads: int, tokens: int) -> int:
    """Return how many programs share the tiles of a head (or of a part of its query heads).

    There can be many more tiles than a step usually has: up to one for each row, which may be a
    few tokens. With a program for each, a step of one-token rows only would start thousands, wave
    after wave, to find nothing to do. So there are as many as full tiles fit into the step, and as
    the GPU computes at a time; each takes every so many-th tile.
    """
    return min(T // tokens + min(B, T), max(T // tokens, -(-NUM_MULTIPROCESSORS // num_heads)))


def _tile_table(
    batch: RaggedBatch, tokens: int, num_tiles: int
) -> tuple[Int[Array, "4 num_tiles"], Int[Array, " 1"]]:
    """Say of each tile its row, first token, number of tokens and position; and how many there are.

    Every layer of a step makes the same table, so XLA makes it once.
    """
    starts = tile_starts(batch, tokens)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    # All at once: the other ways to search loop on the host.
    row = jnp.searchsorted(starts, tile, side="right", method="compare_all").astype(jnp.int32) - 1
    row = jnp.minimum(row, starts.shape[0] - 2)
    first = batch.query_start_loc[row] + (tile - starts[row]) * tokens
    end = batch.query_start_loc[row + 1]
    count = jnp.minimum(end - first, tokens)
    position = batch.seq_lens[row] - (end - first)
    return jnp.stack([row, first, count, position]), starts[-1:]
