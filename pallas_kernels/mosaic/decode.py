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

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import softmax
from pallas_kernels.mosaic.combine import combine
from pallas_kernels.mosaic.interpret import accumulate
from pallas_kernels.mosaic.pages import Pages, load_blocks
from pallas_kernels.mosaic.ring import Ring, make_ring, ring_scratch, swizzle_bytes, swizzled
from pallas_kernels.mosaic.softmax import ROWS, TILE, Running, ScoreRule
from pallas_kernels.mosaic.support import require
from pallas_kernels.mosaic.tiles import MosaicDecodeTiles
from pallas_kernels.mosaic.versions import store_unswizzled
from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What is static in a call.

    Attributes:
        group: Query heads per key/value head, G.
        head_dim: H.
        dtype: Of queries, keys and values.
        copy_len: Keys that one copy brings: a page, or a block's share of it.
        page_size: Tokens per page.
        max_keys: Keys that a row of the page table can hold.
        max_query_len: Most tokens of a row.
        num_rows: Rows that may be decoded.
        num_splits: S.
        split_blocks: Blocks of a split, which then starts at multiples of as many; None: the row's
            blocks are divided evenly.
        rule: From products to scores.
        sliding_window: Keys visible to a token; None for all.
        tiles: Sizes.
        interpret: For the interpreter.
    """

    group: int
    head_dim: int
    dtype: Any
    copy_len: int
    page_size: int
    max_keys: int
    max_query_len: int
    num_rows: int
    num_splits: int
    split_blocks: int | None
    rule: ScoreRule
    sliding_window: int | None
    tiles: MosaicDecodeTiles
    interpret: Any

    @property
    def query_rows(self) -> int:
        """Tokens × heads that share a key/value head."""
        return self.max_query_len * self.group

    @property
    def num_tiles(self) -> int:
        """Tiles of `ROWS` rows that they need."""
        return -(-self.query_rows // ROWS)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile that are read and written: TMA takes swizzled rows by eights."""
        return ROWS if self.num_tiles > 1 else -(-self.query_rows // 8) * 8


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
    shape = _Shape(
        group=N // K,
        head_dim=H,
        dtype=q.dtype,
        copy_len=min(page_size, tiles.block_k),
        page_size=page_size,
        max_keys=max_keys,
        max_query_len=max_query_len,
        num_rows=num_rows,
        num_splits=(
            _even_splits(most_seen, num_rows * K * -(-query_rows // ROWS), tiles)
            if split_len is None
            else _fixed_splits(most_seen, max_keys, split_len)
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


def plan_splits(
    seq_lens: Int[Array, " rows"], lengths: Int[Array, " rows"], shape: _Shape
) -> Int[Array, "rows S 5"]:
    """Divide each row's keys into splits.

    Args:
        seq_lens: Keys.
        lengths: Tokens; 0 for a row that is not to be computed.
        shape: Static sizes.

    Returns:
        int32: first key of the split; its steps, 0 for a split that the row does not reach; first
        key that the row's tokens see; the row's keys; the position of its first token.
    """
    block_k = shape.tiles.block_k
    # More keys than the table holds would lead behind its end.
    seq_lens = jnp.where(lengths > 0, jnp.minimum(seq_lens, shape.max_keys), 0)
    position = seq_lens - lengths
    oldest = jnp.zeros_like(seq_lens)
    if shape.sliding_window is not None:
        oldest = jnp.maximum(position - shape.sliding_window + 1, 0)
    first, end = oldest // block_k, -(-seq_lens // block_k)
    if shape.split_blocks is None:
        least = -(-shape.tiles.min_split_len // block_k)
        size = jnp.maximum(-(-(end - first) // shape.num_splits), least)
        origin = first
    else:
        size = jnp.full_like(first, shape.split_blocks)
        origin = first // size * size
    split = jnp.arange(shape.num_splits, dtype=jnp.int32)
    start = origin[:, None] + split[None] * size[:, None]
    stop = jnp.minimum(start + size[:, None], end[:, None])
    start = jnp.maximum(start, first[:, None])
    row_wide = (jnp.broadcast_to(x[:, None], start.shape) for x in (oldest, seq_lens, position))
    columns = (start * block_k, jnp.maximum(stop - start, 0), *row_wide)
    return jnp.stack(columns, axis=-1).astype(jnp.int32)


def _even_splits(most_seen: int, num_programs: int, tiles: MosaicDecodeTiles) -> int:
    """Return S for rows that divide their keys evenly; `num_programs` is their number for S = 1."""
    useful = -(-most_seen // tiles.min_split_len)
    return max(1, min(useful, -(-tiles.num_programs // num_programs)))


def _fixed_splits(most_seen: int, max_keys: int, split_len: int) -> int:
    """Return S for splits that start at multiples of `split_len`."""
    # What is seen may start anywhere in its first split.
    touched = (most_seen + split_len - 2) // split_len + 1
    return min(-(-max_keys // split_len), touched)


def _tile_queries(q: Array, tokens: Array, K: int, shape: _Shape) -> Float[Array, "rows K M H"]:
    """Collect each row's queries by key/value head, token-major, padded to whole tiles."""
    rows, Q = tokens.shape
    x = q.at[tokens].get(mode="clip") if Q > 1 else q[:rows, None]
    x = x.reshape(rows, Q, K, shape.group, shape.head_dim)
    x = jnp.moveaxis(x, 2, 1).reshape(rows, K, shape.query_rows, shape.head_dim)
    padding = shape.num_tiles * shape.tile_rows - shape.query_rows
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)))


def _untile(x: Array, K: int, shape: _Shape) -> Array:
    """From [rows, K, S, M, …] to [rows, S, Q * N, …]."""
    rows, _, S, _, *rest = x.shape
    x = x[:, :, :, : shape.query_rows]
    x = x.reshape(rows, K, S, shape.max_query_len, shape.group, *rest)
    return jnp.moveaxis(x, 1, 3).reshape(rows, S, -1, *rest)


def _run(shape: _Shape, ring_type: type[Ring]):
    """Return the kernel, a function of queries, pages, plan and page table."""

    def run(q, k_pages, v_pages, plan, table):
        rows, K, M, H = q.shape
        parts = (rows, K, shape.num_splits, M)

        def body(*refs, **scratch):
            _kernel(*refs, scratch=scratch, shape=shape, ring_type=ring_type)

        return plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct((*parts, H), jnp.float32),
                jax.ShapeDtypeStruct(parts, jnp.float32),
                jax.ShapeDtypeStruct(parts, jnp.float32),
            ],
            grid=(K * shape.num_tiles, shape.num_splits, rows),
            grid_names=("head_tile", "split", "row"),
            scratch_types=_scratch(shape),
            num_threads=2,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="mosaic_paged_decode",
            interpret=shape.interpret,
        )(q, k_pages, v_pages, plan, table)

    return run


def _scratch(shape: _Shape) -> dict[str, Any]:
    H, stages, block_k = shape.head_dim, shape.tiles.num_stages, shape.tiles.block_k
    return {
        # Outputs take the place of the queries, which are no longer needed then.
        "qo": plgpu.RefUnion(
            plgpu.SMEM((ROWS, H), shape.dtype, transforms=swizzled(H, shape.dtype)),
            plgpu.SMEM((ROWS, H), jnp.float32),
        ),
        "sums": plgpu.SMEM((2, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(),
        **ring_scratch(
            (stages, block_k, H), shape.dtype, copies=block_k // shape.copy_len, consumers=1
        ),
    }


@dataclass(frozen=True)
class _Split:
    """One split's keys, traced scalars; see `plan_splits`."""

    first_key: Array
    num_steps: Array
    oldest: Array
    seq_len: Array
    position: Array


def _kernel(
    q_ref,  # [rows, K, M, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,
    plan_ref,  # [rows, S, 5]
    table_ref,  # [B, P]
    acc_ref,  # [rows, K, S, M, H]
    max_ref,  # [rows, K, S, M]
    sum_ref,
    *,
    scratch: dict[str, Any],
    shape: _Shape,
    ring_type: type[Ring],
) -> None:
    """Compute one split of one row and head."""
    wg = lax.axis_index("wg")
    row, index = lax.axis_index("row"), lax.axis_index("split")
    head = lax.div(lax.axis_index("head_tile"), jnp.int32(shape.num_tiles))
    tile = lax.rem(lax.axis_index("head_tile"), jnp.int32(shape.num_tiles))
    split = _Split(*(plan_ref[row, index, i] for i in range(5)))
    ring = make_ring(ring_type, shape.tiles.num_stages, scratch)

    @pl.when(wg == 1)
    def _load():
        pages = Pages(
            table=table_ref,
            row=row,
            head=head,
            oldest=split.oldest,
            seq_len=split.seq_len,
            copy_len=shape.copy_len,
            page_size=shape.page_size,
        )
        load_blocks(pages, k_ref, v_ref, ring, split.first_key, split.num_steps)

    @pl.when(wg == 0)
    def _compute():
        queries, acc = scratch["qo"]
        sums, used = scratch["sums"], slice(0, shape.tile_rows)
        mine = pl.ds(tile * shape.tile_rows, shape.tile_rows)

        @pl.when(split.num_steps > 0)
        def _():
            barrier = scratch["q_full"]
            plgpu.copy_gmem_to_smem(q_ref.at[row, head, mine], queries.at[used], barrier)
            plgpu.barrier_wait(barrier)

        step = lambda i, state: _step(  # noqa: E731
            i, state, split, ring, queries, tile, shape
        )
        start = softmax.start(shape.head_dim)
        state = lax.fori_loop(jnp.int32(0), split.num_steps, step, start)
        sums.at[0][...] = state.row_max
        sums.at[1][...] = state.row_sum

        @pl.when(split.num_steps > 0)
        def _():
            store_unswizzled(acc, state.acc)

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums.at[0, used], max_ref.at[row, head, index, mine])
        plgpu.copy_smem_to_gmem(sums.at[1, used], sum_ref.at[row, head, index, mine])

        # Nobody reads the values of a split without keys.
        @pl.when(split.num_steps > 0)
        def _():
            plgpu.copy_smem_to_gmem(acc.at[used], acc_ref.at[row, head, index, mine])

        plgpu.wait_smem_to_gmem(0)


def _step(
    step: Array, state: Running, split: _Split, ring: Ring, queries, tile: Array, shape: _Shape
) -> Running:
    """Take in one block of keys and values."""
    H, block_k, rule = shape.head_dim, shape.tiles.block_k, shape.rule
    slot = ring.slot(step)
    ring.wait_full("k", step)

    def multiply(products_ref):
        plgpu.wgmma(products_ref, queries, ring.k.at[slot].transpose((1, 0)))
        return products_ref[...]

    products = pl.run_scoped(multiply, plgpu.ACC((ROWS, block_k), jnp.float32))
    ring.release("k", step)
    first_key = split.first_key + step * block_k
    seen = _seen(first_key - split.position, tile, products.shape, shape)
    scores = jnp.where(seen, rule.capped(products), softmax.MASKED)
    state, weights = softmax.see(state, scores, rule.log2_scale)
    ring.wait_full("v", step)
    values, used = ring.v.at[slot], split.seq_len - first_key

    @pl.when(used < block_k)
    def _():
        columns = swizzle_bytes(H, shape.dtype) // jnp.dtype(shape.dtype).itemsize
        softmax.clear_values_from(values, used, head_dim=H, columns=columns)

    weights = weights.astype(shape.dtype)
    acc = accumulate(state.acc, weights, values, interpret=shape.interpret)
    ring.release("v", step)
    return state._replace(acc=acc)


def _seen(first_key: Array, tile: Array, dims: tuple[int, ...], shape: _Shape) -> Array:
    """Return which keys each row sees; `first_key` is counted from the row's first token."""
    key = plgpu.broadcasted_iota(jnp.int32, dims, 1, layout=TILE) + first_key
    if shape.max_query_len == 1:
        seen = key <= 0
        return seen if shape.sliding_window is None else seen & (key > -shape.sliding_window)
    row = plgpu.broadcasted_iota(jnp.int32, dims, 0, layout=TILE) + tile * shape.tile_rows
    token = lax.div(row, jnp.full_like(row, shape.group))
    seen = key <= token
    return seen if shape.sliding_window is None else seen & (key > token - shape.sliding_window)
