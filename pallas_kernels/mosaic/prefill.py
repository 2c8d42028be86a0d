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

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import softmax
from pallas_kernels.mosaic.interpret import accumulate
from pallas_kernels.mosaic.pages import Pages, load_blocks
from pallas_kernels.mosaic.prefill_plan import plan_tiles
from pallas_kernels.mosaic.ring import Ring, make_ring, ring_scratch, swizzle_bytes, swizzled
from pallas_kernels.mosaic.softmax import ROWS, TILE, Running, ScoreRule
from pallas_kernels.mosaic.support import require
from pallas_kernels.mosaic.tiles import MosaicPrefillTiles
from pallas_kernels.mosaic.versions import store_unswizzled
from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Float

CONSUMERS = 2
"""Warpgroups that compute."""

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 32
"""Registers a thread: 2 × 240 + 32 are within the 512 that three warpgroups share."""

MOST_UNMASKED = 192
"""Head dims above this mask every step: the bounds of three loops would be spilled beside an
accumulator of 128 registers, and per product of so many columns a mask costs little."""


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What is static in a call.

    Attributes:
        heads_per_tile: Query heads in a tile, a power of two that divides the group.
        group: Query heads per key/value head, G.
        head_dim: H.
        dtype: Of queries, keys and values.
        copy_len: Keys that one copy brings: a page, or a block's share of it.
        page_size: Tokens per page.
        rule: From products to scores.
        sliding_window: Keys visible to a token; None for all.
        has_sinks: Whether there is a sink per head.
        tiles: Sizes.
        interpret: For the interpreter.
    """

    heads_per_tile: int
    group: int
    head_dim: int
    dtype: Any
    copy_len: int
    page_size: int
    rule: ScoreRule
    sliding_window: int | None
    has_sinks: bool
    tiles: MosaicPrefillTiles
    interpret: Any

    @property
    def group_tokens(self) -> int:
        """Tokens of one warpgroup."""
        return ROWS // self.heads_per_tile

    @property
    def tile_tokens(self) -> int:
        return CONSUMERS * self.group_tokens


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
    shape = _Shape(
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
        _kernel(*refs, scratch=scratch, shape=shape, ring_type=ring_type)

    result = plgpu.kernel(
        body,
        out_type=q_type if target is None else (),
        grid=(N // heads_per_tile, work.shape[0]),
        grid_names=("heads", "tile"),
        scratch_types=_scratch(shape),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mosaic_paged_prefill",
        interpret=interpret,
    )(*operands)
    return (result if target is None else jax.freeze(target))[:T]


def _sink_rows(sinks: Array, shape: _Shape) -> Float[Array, "heads 64"]:
    """Spread the sinks over the rows of the tiles, to base 2."""
    rows = jnp.repeat(sinks.astype(jnp.float32) * softmax.LOG2E, shape.group_tokens)
    return rows.reshape(-1, ROWS)


def _scratch(shape: _Shape) -> dict[str, Any]:
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


@dataclass(frozen=True)
class _Tile:
    """One tile's tokens and keys, traced scalars.

    Attributes:
        row: Row of the page table.
        first_token: Where the tile starts, a multiple of 8.
        start: First of its tokens that belongs to the row, counted from there.
        stop: The token behind the last of those.
        position: Of the tile's first token; negative if that is not the row's.
        seq_len: Keys in the row's pages.
        first_key: First key of step 0.
        num_steps: Steps over keys.
        full_start: First step whose keys all tokens see.
        full_end: The step behind the last of those.
    """

    row: Array
    first_token: Array
    start: Array
    stop: Array
    position: Array
    seq_len: Array
    first_key: Array
    num_steps: Array
    full_start: Array
    full_end: Array

    @classmethod
    def read(cls, work_ref, index, shape: _Shape) -> _Tile:
        block_k, window = jnp.int32(shape.tiles.block_k), shape.sliding_window
        row, eighths, start, stop, position, seq_len = (work_ref[index, i] for i in range(6))
        first, end = position + start, position + stop
        first_key = full_start = jnp.int32(0)
        if window is not None:
            first_key = jnp.maximum(first - window + 1, 0)
            first_key -= lax.rem(first_key, jnp.int32(shape.copy_len))
        has_keys = (seq_len > 0) & (start < stop)
        num_steps = jnp.where(has_keys, pl.cdiv(end - first_key, block_k), 0)
        full_end = lax.div(jnp.maximum(first + 1 - first_key, 0), block_k)
        if window is not None:
            hidden = jnp.maximum(end - window - first_key, 0)
            full_start = jnp.minimum(pl.cdiv(hidden, block_k), num_steps)
        full_end = jnp.clip(full_end, full_start, num_steps)
        return cls(row, eighths * 8, start, stop, position, seq_len, first_key, num_steps,
                   full_start, full_end)  # fmt: skip


def _kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,
    work_ref,  # [tiles, 6]
    table_ref,  # [B, P]
    *refs,  # sinks [N // heads_per_tile, ROWS] if there are any; out [T, N, H]
    scratch: dict[str, Any],
    shape: _Shape,
    ring_type: type[Ring],
) -> None:
    """Compute one tile."""
    *sinks_ref, out_ref = refs
    wg = lax.axis_index("wg")
    heads = lax.axis_index("heads")
    ring = make_ring(ring_type, shape.tiles.num_stages, scratch)
    # Read again wherever it is needed: scalars that are live across a change of registers, or
    # across the loop for the sake of its end, would be spilled.
    read_tile = lambda: _Tile.read(work_ref, lax.axis_index("tile"), shape)  # noqa: E731

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
            group = _Group(shape, tile, ring, wg, heads, scratch)
            group.load_queries(q_ref)
            state = group.attend()
            sinks = None
            if sinks_ref:
                sinks = plgpu.load(sinks_ref[0].at[heads], layout=TILE.reduce(1), optimized=False)
            out = softmax.finish(state, sinks)
            _Group(shape, read_tile(), ring, wg, heads, scratch).store(out, out_ref)


@dataclass(frozen=True)
class _Group:
    """One computing warpgroup. Its rows are head-major: row r is head r // n, token r % n of n.

    Attributes:
        shape: Static sizes.
        tile: The tile.
        ring: Where keys and values arrive.
        wg: Its number, 0 or 1.
        heads: Its heads are `heads_per_tile` from this many times `heads_per_tile` on.
        scratch: The kernel's scratch.
    """

    shape: _Shape
    tile: _Tile
    ring: Ring
    wg: Array
    heads: Array
    scratch: dict[str, Any]

    @property
    def first_token(self) -> Array:
        return self.wg * self.shape.group_tokens

    @cached_property
    def distance(self) -> Array:
        """Position of its first token, counted from the first key of step 0."""
        return self.tile.position + self.first_token - self.tile.first_key

    @cached_property
    def num_keys(self) -> Array:
        """Keys of the row, counted from there."""
        return self.tile.seq_len - self.tile.first_key

    @property
    def head_ids(self) -> list[Array]:
        first = self.heads * self.shape.heads_per_tile
        return [first + i for i in range(self.shape.heads_per_tile)]

    def load_queries(self, q_ref) -> None:
        queries, barrier = self.scratch["qo"][0].at[self.wg], self.scratch["q_full"].at[self.wg]
        n = self.shape.group_tokens
        # Some of the tokens may belong to other rows; behind T, TMA fills in zeros.
        tokens = pl.ds(self.tile.first_token + self.first_token, n)
        for i, head in enumerate(self.head_ids):
            source = q_ref.at[tokens, head]
            plgpu.copy_gmem_to_smem(source, queries.at[i * n : (i + 1) * n], barrier)
        plgpu.barrier_wait(barrier)

    def attend(self) -> Running:
        """Return the softmax over all keys."""
        tile = self.tile
        _ = self.distance, self.num_keys  # outside of the loops
        # Taking turns: at each meeting one warpgroup has issued its products and goes on to its
        # exponentials, for the other it is the reverse. Warpgroup 0 is one meeting ahead.
        pl.when(self.wg == 1)(self.ring.meet)
        state = softmax.start(self.shape.head_dim)
        step = lambda masked: lambda i, state: self.step(i, state, masked=masked)  # noqa: E731
        if self.shape.head_dim > MOST_UNMASKED:
            state = lax.fori_loop(jnp.int32(0), tile.num_steps, step(True), state)
        else:
            if self.shape.sliding_window is not None:
                state = lax.fori_loop(jnp.int32(0), tile.full_start, step(True), state)
            state = lax.fori_loop(tile.full_start, tile.full_end, step(False), state)
            state = lax.fori_loop(tile.full_end, tile.num_steps, step(True), state)
        pl.when(self.wg == 0)(self.ring.meet)
        return state

    def step(self, step: Array, state: Running, *, masked: bool) -> Running:
        ring, rule = self.ring, self.shape.rule
        slot = ring.slot(step)
        queries = self.scratch["qo"][0].at[self.wg]
        ring.wait_full("k", step)
        if masked:
            # Here and not before their product, since scores and weights take no registers yet.
            ring.wait_full("v", step)
            self.clear_unused_values(step)

        def multiply(products_ref):
            plgpu.wgmma(products_ref, queries, ring.k.at[slot].transpose((1, 0)))
            self.ring.meet()
            return products_ref[...]

        products = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.shape.tiles.block_k), jnp.float32))
        ring.release("k", step)
        scores = rule.capped(products)
        if masked:
            scores = jnp.where(self.seen(step, scores.shape), scores, softmax.MASKED)
        state, weights = softmax.see(state, scores, rule.log2_scale)
        weights = weights.astype(self.shape.dtype)
        self.ring.meet()
        if not masked:
            ring.wait_full("v", step)
        acc = accumulate(state.acc, weights, ring.v.at[slot], interpret=self.shape.interpret)
        ring.release("v", step)
        return state._replace(acc=acc)

    def seen(self, step: Array, shape: tuple[int, ...]) -> Array:
        """Return which keys of a block each row sees."""
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
        token &= self.shape.group_tokens - 1
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        # Differences of keys and tokens would be the same in all steps, and be kept in registers.
        key += step * self.shape.tiles.block_k - self.distance
        if self.shape.sliding_window is None:
            return key <= token
        # 0 <= token - key < window, as one comparison: a later key is a huge unsigned number.
        return (token - key).astype(jnp.uint32) < self.shape.sliding_window

    def clear_unused_values(self, step: Array) -> None:
        """Zero the block's slots behind the row's last key.

        Warpgroup 0 does it for both. It is one turn ahead: warpgroup 1 multiplies these values only
        after meetings that warpgroup 0 comes to later than here.
        """
        used = self.num_keys - step * self.shape.tiles.block_k

        @pl.when((self.wg == 0) & (used < self.shape.tiles.block_k))
        def _():
            H, dtype = self.shape.head_dim, self.shape.dtype
            columns = swizzle_bytes(H, dtype) // jnp.dtype(dtype).itemsize
            values = self.ring.v.at[self.ring.slot(step)]
            softmax.clear_values_from(values, used, head_dim=H, columns=columns)

    def store(self, out: Array, out_ref) -> None:
        """Write the rows of the tile's tokens, and no others."""
        n, tile = self.shape.group_tokens, self.tile
        whole_tile, single_rows = (ref.at[self.wg] for ref in self.scratch["qo"])
        first = tile.first_token + self.first_token
        out = out.astype(self.shape.dtype)
        is_whole = (tile.start == 0) & (tile.stop == self.shape.tile_tokens)

        @pl.when(is_whole)
        def _():
            whole_tile[...] = out
            plgpu.commit_smem()
            for i, head in enumerate(self.head_ids):
                target = out_ref.at[pl.ds(first, n), head]
                plgpu.copy_smem_to_gmem(whole_tile.at[i * n : (i + 1) * n], target)

        @pl.when(~is_whole)
        def _():
            # The layouts overlap: the other warpgroup must have read its queries.
            self.ring.meet()
            store_unswizzled(single_rows, out)
            plgpu.commit_smem()
            start, stop = (
                jnp.clip(edge - self.first_token, 0, n) for edge in (tile.start, tile.stop)
            )
            count = stop - start
            # A copy has a fixed size: one for each power of two in the count.
            for size in (2**i for i in range(n.bit_length() - 1, -1, -1)):

                @pl.when((count & size) != 0)
                def _(size=size):
                    token = start + (count & -(2 * size))
                    for i, head in enumerate(self.head_ids):
                        target = out_ref.at[pl.ds(first + token, size), head]
                        source = single_rows.at[pl.ds(i * n + token, size)]
                        plgpu.copy_smem_to_gmem(source, target)

        plgpu.wait_smem_to_gmem(0)
