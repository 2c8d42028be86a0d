"""The kernel of prefill: what three warpgroups of a block do, and what memory they share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import softmax
from pallas_kernels.mosaic.pages import Pages, load_blocks
from pallas_kernels.mosaic.prefill_group import ComputingGroup
from pallas_kernels.mosaic.prefill_tile import CONSUMERS, PrefillShape, Tile
from pallas_kernels.mosaic.ring import Ring, make_ring, ring_scratch, swizzled
from pallas_kernels.mosaic.softmax import ROWS, TILE

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 32
"""Registers a thread: 2 × 240 + 32 are within the 512 that three warpgroups share."""


def prefill_scratch(shape: PrefillShape) -> dict[str, Any]:
    """Return the shared memory and the barriers of a block."""
    stages, block_k, H = shape.tiles.num_stages, shape.tiles.block_k, shape.head_dim
    tile = (CONSUMERS, ROWS, H)
    return {
        # Queries and outputs take turns in the same memory. Whole tiles go out as they came in;
        # a tile that ends early goes out row by row, which the swizzled layout does not allow.
        "qo": plgpu.RefUnion(
            plgpu.SMEM(tile, shape.dtype, transforms=swizzled(H, shape.dtype)),
            plgpu.SMEM(tile, shape.dtype),
        ),
        "q_full": plgpu.Barrier(num_arrivals=shape.heads_per_tile, num_barriers=CONSUMERS),
        **ring_scratch(
            (stages, block_k, H),
            shape.dtype,
            copies=block_k // shape.copy_len,
            consumers=CONSUMERS,
        ),
    }


def prefill_kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,
    work_ref,  # [tiles, 6]
    table_ref,  # [B, P]
    *refs,  # sinks [N // heads_per_tile, ROWS] if there are any; out [T, N, H]
    scratch: dict[str, Any],
    shape: PrefillShape,
    ring_type: type[Ring],
) -> None:
    """Compute one tile."""
    *sinks_ref, out_ref = refs
    wg = lax.axis_index("wg")
    heads = lax.axis_index("heads")
    ring = make_ring(ring_type, shape.tiles.num_stages, scratch)
    # Read again wherever it is needed: scalars that are live across a change of registers, or
    # across the loop for the sake of its end, would be spilled.
    read_tile = lambda: Tile.read(work_ref, lax.axis_index("tile"), shape)  # noqa: E731

    @pl.when(wg == CONSUMERS)
    def _load():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        tile = read_tile()
        head = lax.div(heads * shape.heads_per_tile, jnp.int32(shape.group))
        pages = Pages(
            table=table_ref,
            row=tile.row,
            head=head,
            oldest=tile.first_key,
            seq_len=tile.seq_len,
            copy_len=shape.copy_len,
            page_size=shape.page_size,
        )
        load_blocks(pages, k_ref, v_ref, ring, tile.first_key, tile.num_steps)

    @pl.when(wg < CONSUMERS)
    def _compute():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        tile = read_tile()

        @pl.when(tile.start < tile.stop)
        def _():
            group = ComputingGroup(shape, tile, ring, wg, heads, scratch)
            group.load_queries(q_ref)
            state = group.attend()
            sinks = None
            if sinks_ref:
                sinks = plgpu.load(sinks_ref[0].at[heads], layout=TILE.reduce(1), optimized=False)
            out = softmax.finish(state, sinks)
            ComputingGroup(shape, read_tile(), ring, wg, heads, scratch).store(out, out_ref)
