"""Paged decode for Hopper: rows of one or a few tokens attend to all of their pages.

Knows rows, pages and splits; knows nothing of devices. A block of the grid computes one split of
one row and key/value head: one warpgroup loads pages by TMA into a ring, the other multiplies. All
query heads of the key/value head, times the row's tokens, stand in one tile of 64 rows, whatever
their number: the tensor cores have nothing better to do. `combine` puts the splits together.

What to expect on an H200: a block of 64 keys and values of H 128 is 32 KB, 0.9 µs of a
multiprocessor's share of 4.8 TB/s. Its two products take 0.3 µs and its exponentials 0.15 µs, which
the next blocks' copies overlap; so memory is the limit as long as more than 36 KB, the bandwidth
times its latency, are in flight on each multiprocessor.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.combine import combine
from pallas_kernels.mosaic.decode_kernel import decode_kernel, decode_scratch
from pallas_kernels.mosaic.decode_plan import DecodeShape, even_splits, fixed_splits, plan_splits
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.mosaic.softmax import ROWS, ScoreRule
from pallas_kernels.mosaic.support import require
from pallas_kernels.mosaic.tiles import MosaicDecodeTiles
from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Float


def paged_decode(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "num_pages K page_size H"],
    v_pages: Float[Array, "num_pages K page_size H"],
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    max_query_len: int = 1,
    split_len: int | None = None,
    tiles: MosaicDecodeTiles,
    interpret: Any = None,
    ring_type: type[Ring] = Ring,
) -> Float[Array, "T N H"]:
    """Return attention of the tokens of rows [0, num_decode_rows); zeros for all other tokens.

    For these rows the same as `pallas_kernels.paged_attention`. Pages are read in place, and only
    those that a row's tokens see. How many splits there are depends on shapes alone.

    Args:
        q: Queries, packed as `batch` says; bfloat16 or float16.
        k_pages: Keys by page, in the dtype of q.
        v_pages: Values by page.
        batch: Which tokens and pages belong together. With a `max_query_len` of more than 1 the
            decode rows may have 1 to so many tokens, causal among them.
        scale: Multiplies the scores; positive.
        sliding_window: Keys visible to a token, itself included; None for all.
        logit_softcap: Scores become `cap * tanh(score / cap)`.
        sinks: Per head, a score that takes part in the softmax with a value of zero.
        max_query_len: Most tokens of a decode row.
        split_len: Divide a row's keys at multiples of so many (whole blocks) instead of evenly:
            then its result is bitwise the same whatever B, P and the other rows are.
        tiles: Sizes of the blocks.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU, slowly, for tests.
        ring_type: What passes the slots around; tests break it.

    Returns:
        [T, N, H] in q's dtype.

    Raises:
        NotImplementedError: The kernel does not do this here; see `mosaic.refusal`.
        ValueError: `split_len` is no multiple of the tiles' `block_k`.
    """
    if split_len is not None and (split_len < 1 or split_len % tiles.block_k):
        raise ValueError(f"{split_len=} must be a multiple of {tiles.block_k=}")
    require(q, k_pages, scale=scale, interpret=interpret)
    T, N, H = q.shape
    _, K, page_size, _ = k_pages.shape
    B, P = batch.page_table.shape
    num_rows, max_keys = min(B, T), P * page_size
    query_rows = max_query_len * (N // K)
    most_seen = min(max_keys, (sliding_window or max_keys) + max_query_len - 1)
    shape = DecodeShape(
        group=N // K,
        head_dim=H,
        dtype=q.dtype,
        copy_len=min(page_size, tiles.block_k),
        page_size=page_size,
        max_keys=max_keys,
        max_query_len=max_query_len,
        num_rows=num_rows,
        num_splits=(
            even_splits(most_seen, num_rows * K * -(-query_rows // ROWS), tiles)
            if split_len is None
            else fixed_splits(most_seen, max_keys, split_len)
        ),
        split_blocks=split_len and split_len // tiles.block_k,
        rule=ScoreRule(scale, logit_softcap),
        sliding_window=sliding_window,
        tiles=tiles,
        interpret=interpret,
    )
    lengths = jnp.clip(jnp.diff(batch.query_start_loc)[:num_rows], 0, max_query_len)
    lengths = jnp.where(jnp.arange(num_rows) < batch.num_decode_rows, lengths, 0)
    # [rows, Q]; a token that its row does not have stands behind the last.
    offsets = jnp.arange(max_query_len, dtype=jnp.int32)[None]
    tokens = batch.query_start_loc[:num_rows, None] + offsets
    tokens = jnp.where(offsets < lengths[:, None], tokens, T)
    parts = _run(shape, ring_type)(
        _tile_queries(q, tokens, K, shape),
        k_pages,
        v_pages,
        plan_splits(batch.seq_lens[:num_rows], lengths, shape),
        batch.page_table,
    )
    acc, row_max, row_sum = (_untile(x, K, shape) for x in parts)
    if sinks is not None:
        sinks = jnp.tile(sinks, max_query_len)
    out = combine(acc, row_max, row_sum, sinks).astype(q.dtype)
    out = out.reshape(num_rows * max_query_len, N, H)
    return jnp.zeros_like(q).at[tokens.reshape(-1)].set(out, mode="drop")


def _tile_queries(
    q: Array, tokens: Array, K: int, shape: DecodeShape
) -> Float[Array, "rows K M H"]:
    """Collect each row's queries by key/value head, token-major, padded to whole tiles."""
    rows, Q = tokens.shape
    x = q.at[tokens].get(mode="clip") if Q > 1 else q[:rows, None]
    x = x.reshape(rows, Q, K, shape.group, shape.head_dim)
    x = jnp.moveaxis(x, 2, 1).reshape(rows, K, shape.query_rows, shape.head_dim)
    padding = shape.num_tiles * shape.tile_rows - shape.query_rows
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)))


def _untile(x: Array, K: int, shape: DecodeShape) -> Array:
    """From [rows, K, S, M, …] to [rows, S, Q * N, …]."""
    rows, _, S, _, *rest = x.shape
    x = x[:, :, :, : shape.query_rows]
    x = x.reshape(rows, K, S, shape.max_query_len, shape.group, *rest)
    return jnp.moveaxis(x, 1, 3).reshape(rows, S, -1, *rest)


def _run(shape: DecodeShape, ring_type: type[Ring]):
    """Return the kernel, a function of queries, pages, plan and page table."""

    def run(q, k_pages, v_pages, plan, table):
        rows, K, M, H = q.shape
        parts = (rows, K, shape.num_splits, M)

        def body(*refs, **scratch):
            decode_kernel(*refs, scratch=scratch, shape=shape, ring_type=ring_type)

        return plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct((*parts, H), jnp.float32),
                jax.ShapeDtypeStruct(parts, jnp.float32),
                jax.ShapeDtypeStruct(parts, jnp.float32),
            ],
            grid=(K * shape.num_tiles, shape.num_splits, rows),
            grid_names=("head_tile", "split", "row"),
            scratch_types=decode_scratch(shape),
            num_threads=2,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="mosaic_paged_decode",
            interpret=shape.interpret,
        )(q, k_pages, v_pages, plan, table)

    return run
