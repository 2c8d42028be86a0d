"""Paged decode: rows of one or a few tokens, each attending to all of its pages.

Decides how the work is cut up, from shapes alone; what is then computed is `decode_kernels`.

A row's keys are divided among `S` programs per key/value head, since one program alone cannot draw
on the whole memory bandwidth (flash-decoding, arXiv:2311.01282). A second kernel puts the parts
together:

    keys of a row     0 ...... [first visible ............................. seq_len)
    programs                   [ split 0 | split 1 | split 2 )  split 3 has nothing to do
    combine                    out = Σ exp(max_s - max) acc_s / Σ exp(max_s - max) sum_s
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Float, Int
from pallas_kernels.tiles import DecodeTiles
from pallas_kernels.triton import backend
from pallas_kernels.triton.decode_kernels import combine_kernel, split_kernel, whole_kernel
from pallas_kernels.triton.decode_shape import DecodeShape

NUM_PROGRAMS = 512
"""Programs that keep any GPU's memory busy: three or four for each of up to 148 multiprocessors.
Fewer are split."""

MAX_TILE_ROWS = 64
"""Tokens × query heads that one program computes; of float32 fewer. More would not fit the shared
memory of small GPUs."""

MIN_SPLIT_BLOCKS = 2
"""Smaller splits would cost more to start and combine than they save. Empirical."""


def paged_decode(
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
    max_query_len: int = 1,
    split_len: int | None = None,
    tiles: DecodeTiles,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Return attention of the tokens of rows [0, num_decode_rows); zeros for all other tokens.

    For these rows the same as `pallas_kernels.paged_attention`. Pages are read in place, and only
    those that a row's tokens see. How many splits there are depends on shapes alone.

    Args:
        q: Queries, packed as `batch` says.
        k_pages: Keys by page: a float type, or int8 or float8_e4m3fn with scales.
        v_pages: Values by page.
        batch: Which tokens and pages belong together. With a `max_query_len` of more than 1 the
            decode rows may have 1 to so many tokens, causal among them.
        scale: Multiplies the scores.
        sliding_window: Keys visible to a token, itself included; None for all.
        logit_softcap: Scores become `cap * tanh(score / cap)`.
        sinks: Per head, a score that takes part in the softmax with a value of zero.
        k_scales: float32; each key is the stored one times its scale.
        v_scales: float32; each value is the stored one times its scale.
        max_query_len: Most tokens of a decode row.
        split_len: Divide a row's keys at multiples of so many (whole blocks) instead of evenly:
            then its result is bitwise the same whatever B, P and the other rows are.
        tiles: Sizes of the blocks, and the most splits where keys are divided evenly.
        interpret: Run on any device, slowly, for tests.

    Returns:
        [T, N, H] in q's dtype.

    Raises:
        ValueError: `split_len` is no multiple of the tiles' `block_k`.
        NotImplementedError: The pages of a layer are so many that offsets into them overflow.
    """
    if split_len is not None and (split_len < 1 or split_len % tiles.block_k):
        raise ValueError(f"{split_len=} must be a multiple of {tiles.block_k=}")
    backend.check_offsets(k_pages, v_pages)
    T, N, H = q.shape
    num_pages, K, page_size, _ = k_pages.shape
    B, P = batch.page_table.shape
    num_rows = min(B, T)
    max_keys = P * page_size
    most_rows = MAX_TILE_ROWS
    if q.dtype.itemsize == 4:
        most_rows //= 2 if H <= 128 else 4
    tile_tokens = max(1, min(max_query_len, most_rows // (N // K)))
    # What a row's tokens can see of its keys.
    most_seen = min(max_keys, (sliding_window or max_keys) + max_query_len - 1)
    shape = DecodeShape(
        group=N // K,
        head_dim=H,
        page_size=page_size,
        num_pages=num_pages,
        max_keys=max_keys,
        max_query_len=max_query_len,
        tile_tokens=tile_tokens,
        rows_are_tokens=max_query_len == 1 and num_rows == T,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        block_k=tiles.block_k,
        split_blocks=split_len and split_len // tiles.block_k,
        min_split_blocks=MIN_SPLIT_BLOCKS,
        num_splits=(
            _even_splits(most_seen, num_rows * K * -(-max_query_len // tile_tokens), tiles)
            if split_len is None
            else _fixed_splits(most_seen, max_keys, split_len)
        ),
        interpret=interpret,
    )
    # Where rows are tokens, the kernel writes all tokens; else those of no decode row stay as here.
    base = None if shape.rows_are_tokens else jnp.zeros_like(q)
    rows = (batch.seq_lens, batch.query_start_loc, batch.num_decode_rows[None])
    inputs = (q, k_pages, v_pages, k_scales, v_scales, batch.page_table, *rows)
    num_warps = max(tiles.num_warps, _least_warps(shape, q.dtype))
    sizes = {"num_warps": num_warps, "num_stages": tiles.num_stages}
    if shape.num_splits == 1:
        last, name, grid = whole_kernel, "paged_decode", (num_rows * shape.num_tiles, K)
    else:
        parts = (num_rows, max_query_len, N, shape.num_splits)
        parts = backend.call(
            partial(split_kernel, shape=shape),
            name="paged_decode_splits",
            grid=(num_rows * shape.num_tiles, K, shape.num_splits),
            out_shape=tuple(
                jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((*parts, H), parts, parts)
            ),
            interpret=interpret,
            **sizes,
        )(*inputs)
        inputs = (*parts, *rows)
        last, name, grid = combine_kernel, "paged_decode_combine", (num_rows * max_query_len, N)
        # 16 splits × 16 numbers a warp; with twice as many some chips run out of registers.
        sizes = {"num_warps": max(1, shape.padded_dim // 16), "num_stages": 1}
    inputs = (*inputs, sinks, base)
    return backend.call(
        partial(last, shape=shape),
        name=name,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={} if base is None else {len(jax.tree.leaves(inputs)) - 1: 0},
        interpret=interpret,
        **sizes,
    )(*inputs)


def _least_warps(shape: DecodeShape, dtype: Any) -> int:
    """Return how many warps can hold a tile's sums in their registers."""
    # float32 numbers are split in two, for products of three passes.
    per_warp = 2048 if jnp.dtype(dtype).itemsize == 2 else 512
    return min(16, max(1, shape.padded_rows * shape.padded_dim // per_warp))


def _even_splits(most_seen: int, num_programs: int, tiles: DecodeTiles) -> int:
    """Return S for rows that divide their keys evenly; `num_programs` is their number for S = 1."""
    useful = -(-most_seen // (MIN_SPLIT_BLOCKS * tiles.block_k))
    return max(1, min(tiles.num_splits, useful, -(-NUM_PROGRAMS // num_programs)))


def _fixed_splits(most_seen: int, max_keys: int, split_len: int) -> int:
    """Return S for splits that start at multiples of `split_len`."""
    # What is seen may start anywhere in its first split.
    touched = (most_seen + split_len - 2) // split_len + 1
    return min(-(-max_keys // split_len), touched)
