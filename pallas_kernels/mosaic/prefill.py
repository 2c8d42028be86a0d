"""Ragged paged prefill for Hopper: chunks of prompts attend to their pages by TMA and wgmma.

Knows rows, pages and tiles; knows nothing of devices. A block of the grid computes one tile: 128
rows, which are tokens times the query heads that share a key/value head, as far as a power of two
of them does (with 3 or 5 heads a group the tile holds one head, and no row is ever padding). Two
warpgroups compute 64 rows each, a third brings keys and values page by page into a ring:

    loads       K0 V0 K1 V1 K2 V2 …                       waits only for free slots
    computes 0  QK0 │softmax0│ PV0 QK1 │softmax1│ PV1 …    one turn ahead
    computes 1      │  QK0   │softmax0 │PV0 QK1 │softmax1│ PV1 …
                    ^ turns: the tensor cores work for one while the other takes exponentials

What to expect on an H100 or H200: a step of 128 rows × 128 keys × H 128 is 8.4 MFLOP, 1.1 µs of a
multiprocessor's tensor cores, and loads 64 KB, which the level-2 cache serves in time since the
heads of a group and neighbouring tiles read the same pages. Exponentials take 128 × 128 / 16 per
cycle = 0.6 µs, hidden behind the other warpgroup's products. So products are the limit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import softmax
from pallas_kernels.mosaic.prefill_kernel import prefill_kernel, prefill_scratch
from pallas_kernels.mosaic.prefill_plan import plan_tiles
from pallas_kernels.mosaic.prefill_tile import CONSUMERS, PrefillShape
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.mosaic.softmax import ROWS, ScoreRule
from pallas_kernels.mosaic.support import require
from pallas_kernels.mosaic.tiles import MosaicPrefillTiles
from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Float


def paged_prefill(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "num_pages K page_size H"],
    v_pages: Float[Array, "num_pages K page_size H"],
    batch: RaggedBatch,
    out: Float[Array, "T N H"] | None = None,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    tiles: MosaicPrefillTiles,
    interpret: Any = None,
    ring_type: type[Ring] = Ring,
) -> Float[Array, "T N H"]:
    """Return attention of the tokens of rows from `num_decode_rows` on, in `out`.

    The same as `pallas_kernels.paged_attention` for these rows. Pages are read in place, and only
    those that a tile's tokens see.

    Args:
        q: Queries, packed as `batch` says; bfloat16 or float16.
        k_pages: Keys by page, in the dtype of q.
        v_pages: Values by page.
        batch: Which tokens and pages belong together.
        out: What to return for all other tokens; None for zeros.
        scale: Multiplies the scores; positive.
        sliding_window: Keys visible to a token, itself included; None for all.
        logit_softcap: Scores become `cap * tanh(score / cap)`.
        sinks: Per head, a score that takes part in the softmax with a value of zero.
        tiles: Sizes of the blocks.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU, slowly, for tests.
        ring_type: What passes the slots around; tests break it.

    Returns:
        [T, N, H] in q's dtype.

    Raises:
        NotImplementedError: The kernel does not do this here; see `mosaic.refusal`.
    """
    require(q, k_pages, scale=scale, interpret=interpret)
    T, N, H = q.shape
    _, K, page_size, _ = k_pages.shape
    group = N // K
    heads_per_tile = min(group & -group, 8)
    shape = PrefillShape(
        heads_per_tile=heads_per_tile,
        group=group,
        head_dim=H,
        dtype=q.dtype,
        copy_len=min(page_size, tiles.block_k),
        page_size=page_size,
        rule=ScoreRule(scale, logit_softcap),
        sliding_window=sliding_window,
        has_sinks=sinks is not None,
        tiles=tiles,
        interpret=interpret,
    )
    work = plan_tiles(batch, T, shape.tile_tokens, fill=out is None)
    # TMA takes swizzled rows by eights.
    padding = ((0, -T % 8), (0, 0), (0, 0))
    operands: list[Any] = [jnp.pad(q, padding), k_pages, v_pages, work, batch.page_table]
    if sinks is not None:
        operands.append(_sink_rows(sinks, shape))
    q_type = jax.ShapeDtypeStruct(operands[0].shape, q.dtype)
    # A reference is written in place.
    target = None if out is None else jax.new_ref(jnp.pad(out, padding))
    if target is not None:
        operands.append(target)

    def body(*refs, **scratch):
        prefill_kernel(*refs, scratch=scratch, shape=shape, ring_type=ring_type)

    result = plgpu.kernel(
        body,
        out_type=q_type if target is None else (),
        grid=(N // heads_per_tile, work.shape[0]),
        grid_names=("heads", "tile"),
        scratch_types=prefill_scratch(shape),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mosaic_paged_prefill",
        interpret=interpret,
    )(*operands)
    return (result if target is None else jax.freeze(target))[:T]


def _sink_rows(sinks: Array, shape: PrefillShape) -> Float[Array, "heads 64"]:
    """Spread the sinks over the rows of the tiles, to base 2."""
    rows = jnp.repeat(sinks.astype(jnp.float32) * softmax.LOG2E, shape.group_tokens)
    return rows.reshape(-1, ROWS)
