"""The kernel of paged decode: what one block of the grid computes.

One warpgroup loads pages by TMA into a ring, the other multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import softmax
from pallas_kernels.mosaic.decode_plan import DecodeShape
from pallas_kernels.mosaic.interpret import accumulate
from pallas_kernels.mosaic.pages import Pages, load_blocks
from pallas_kernels.mosaic.ring import Ring, make_ring, ring_scratch, swizzle_bytes, swizzled
from pallas_kernels.mosaic.softmax import ROWS, TILE, Running
from pallas_kernels.mosaic.versions import store_unswizzled
from pallas_kernels.shapes import Array


def decode_scratch(shape: DecodeShape) -> dict[str, Any]:
    """Return the shared memory and the barriers of a block."""
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


def decode_kernel(
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
    shape: DecodeShape,
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
    step: Array, state: Running, split: _Split, ring: Ring, queries, tile: Array, shape: DecodeShape
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


def _seen(first_key: Array, tile: Array, dims: tuple[int, ...], shape: DecodeShape) -> Array:
    """Return which keys each row sees; `first_key` is counted from the row's first token."""
    key = plgpu.broadcasted_iota(jnp.int32, dims, 1, layout=TILE) + first_key
    if shape.max_query_len == 1:
        seen = key <= 0
        return seen if shape.sliding_window is None else seen & (key > -shape.sliding_window)
    row = plgpu.broadcasted_iota(jnp.int32, dims, 0, layout=TILE) + tile * shape.tile_rows
    token = lax.div(row, jnp.full_like(row, shape.group))
    seen = key <= token
    return seen if shape.sliding_window is None else seen & (key > token - shape.sliding_window)
