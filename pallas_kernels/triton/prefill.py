"""Prefill over pages: chunks of many sequences, packed, each attending to all of its pages.

Knows rows, pages and tiles; knows nothing of devices. One source for every GPU that Pallas' Triton
lowering has.

A tile is up to `block_q` rows, the query tokens of one chunk times the query heads that share a KV
head, so that keys are read once for all of them. The tile visits the keys that any of its tokens
sees, `block_k` at a time, with the running softmax of FlashAttention (arXiv:2205.14135,
algorithm 1):

    keys of a sequence   0 ...... [start ........ first position ........ end) ......
    visited                       rounded down to block_k               end is the last token's

Everything outside of [start, end) is neither computed nor read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kv_pages import product_dtype, value_dtype
from pallas_kernels.ragged_batch import RaggedBatch, tile_starts
from pallas_kernels.shapes import Array, Float, Int
from pallas_kernels.tiles import PrefillTiles
from pallas_kernels.triton import backend

LOG2E = 1.4426950408889634
"""The softmax is taken to base 2: that is the exponential which the hardware has."""

UNSEEN = -(2.0**100)
"""Score of a key that is not visible. Finite, so that the difference of two is no NaN; what rows
without a visible key gather is scaled to zero by their first visible one. A power of two, so that
its product with a factor is exact: GPUs fuse that with the subtraction of the maximum, and of
-1e30 * 0.18 there remained up to 1e22, whose exponential is infinite."""

NUM_MULTIPROCESSORS = 148
"""Of the largest GPU, a B200."""

MIN_PART = 16
"""Columns of the narrowest matrix product."""

MAX_FLOAT32_PART = 64
"""Columns of the widest product in float32, whose operands are split in registers: wider ones do
not fit there."""


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What is static in a call.

    Attributes:
        group: Query heads per KV head, G.
        head_dim: H.
        page_size: Tokens per page, a power of two.
        num_pages: Pages of the pool.
        max_keys: Keys that a row of the page table can hold.
        num_programs: Programs that share the tiles of a head.
        scale: Multiplies the scores.
        sliding_window: Keys visible to a token; None for all.
        logit_softcap: Bound of the scores.
        product_dtype: What queries and keys are multiplied in.
        value_dtype: What weights and values are multiplied in.
        tiles: Sizes.
        interpret: See `backend.dot`.
    """

    group: int
    head_dim: int
    page_size: int
    num_pages: int
    max_keys: int
    num_programs: int
    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    product_dtype: Any
    value_dtype: Any
    tiles: PrefillTiles
    interpret: bool

    @property
    def page_bits(self) -> int:
        return self.page_size.bit_length() - 1

    @property
    def heads_per_tile(self) -> int:
        return min(self.group, self.tiles.block_q)

    @property
    def head_blocks(self) -> int:
        """Tiles side by side that the query heads of a KV head need."""
        return -(-self.group // self.heads_per_tile)

    @property
    def tokens_per_tile(self) -> int:
        return tokens_per_tile(self.group, self.tiles.block_q)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(start, width) of the pieces that the head dim is computed in.

        Widths are powers of two, which the hardware asks for, without the waste of rounding the
        whole up: 80 is 64 + 16 and not 128.
        """
        widest = MAX_FLOAT32_PART if self.product_dtype == jnp.float32 else 1 << 30
        parts, start = [], 0
        left = -(-self.head_dim // MIN_PART) * MIN_PART
        while left:
            width = min(widest, 1 << (left.bit_length() - 1))
            parts.append((start, width))
            start, left = start + width, left - width
        return tuple(parts)


def tokens_per_tile(group: int, block_q: int) -> int:
    """Return how many query tokens of `group` heads each fit into a tile of `block_q` rows."""
    return max(1, block_q // group)


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
    shape = _Shape(
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
        partial(_kernel, shape=shape),
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


def _kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,
    k_scales_ref,  # [num_pages, K, page_size] or None
    v_scales_ref,
    sinks_ref,  # [N] or None
    table_ref,  # [B, P]
    tiles_ref,  # [4, num_tiles]
    num_tiles_ref,  # [1]
    _,  # `out_ref`
    out_ref,  # [T, N, H]
    *,
    shape: _Shape,
):
    """Attend the rows of every so many-th tile to their keys of one KV head."""
    refs = (q_ref, k_ref, v_ref, k_scales_ref, v_scales_ref, sinks_ref, table_ref, tiles_ref)
    # The last tiles of a sequence have the most keys: they come first.
    last = num_tiles_ref[0] - 1 - pl.program_id(0)
    heads = pl.program_id(1)

    def body(i, _):
        _attend_tile(last - i * shape.num_programs, heads, refs, out_ref, shape)

    lax.fori_loop(0, (last + shape.num_programs) // shape.num_programs, body, None)


def _attend_tile(
    tile: Array, heads: Array, refs: tuple[Any, ...], out_ref: Any, shape: _Shape
) -> None:
    """Attend one tile's rows to their keys of one KV head.

    `heads` numbers the KV heads, or where their query heads need several tiles, those.
    """
    q_ref, k_ref, v_ref, k_scales_ref, v_scales_ref, sinks_ref, table_ref, tiles_ref = refs
    block_q, group = shape.tiles.block_q, shape.group
    kv_head, head_block = heads // shape.head_blocks, heads % shape.head_blocks
    row, first, count, position = (tiles_ref[i, tile] for i in range(4))

    m = _iota(block_q)
    token = m // shape.heads_per_tile
    head = head_block * shape.heads_per_tile + m % shape.heads_per_tile  # in the group
    used = (token < count) & (head < group)
    head = kv_head * group + head
    start = jnp.int32(0)
    if shape.sliding_window is not None:
        start = jnp.maximum(position - shape.sliding_window + 1, 0)
    # More keys than the table holds would lead behind its end.
    end = jnp.minimum(position + count, shape.max_keys)

    queries = tuple(
        backend.load(q_ref, _rows(first + token, head, part), mask=_mask(used, part, shape))
        .astype(shape.product_dtype)
        for part in shape.parts
    )  # fmt: skip
    row_max = jnp.full((block_q,), UNSEEN, jnp.float32)
    row_sum = jnp.zeros((block_q,), jnp.float32)
    if sinks_ref is not None:
        # As if a key with this score and no value had been seen first.
        row_max = backend.load(sinks_ref, (head,), mask=used).astype(jnp.float32) * LOG2E
        row_sum = jnp.ones((block_q,), jnp.float32)
    state = (tuple(jnp.zeros(x.shape, jnp.float32) for x in queries), row_max, row_sum)
    attend = partial(
        _attend_block,
        queries=queries,
        positions=position + token,
        row=row,
        kv_head=kv_head,
        start=start,
        end=end,
        refs=(k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref),
        shape=shape,
    )
    block_k = shape.tiles.block_k
    block = start // block_k
    if shape.sliding_window is None:
        # All tokens see all keys up to the first token's own: most blocks need no mask.
        block = jnp.minimum(position + 1, end) // block_k
        state = lax.fori_loop(0, block, partial(attend, masked=False), state)
    end_block = pl.cdiv(end, block_k)
    accs, _, row_sum = lax.fori_loop(block, end_block, partial(attend, masked=True), state)
    inverse = backend.reciprocal(jnp.where(row_sum > 0, row_sum, 1.0), interpret=shape.interpret)
    for part, acc in zip(shape.parts, accs, strict=True):
        value = (acc * inverse[:, None]).astype(out_ref.dtype)
        index, mask = _rows(first + token, head, part), _mask(used, part, shape)
        backend.store(out_ref, index, value, mask=mask)


def _attend_block(
    block, carry, *, queries, positions, row, kv_head, start, end, refs, shape: _Shape, masked: bool
):
    """Add `block_k` keys to the running softmax: one step of the inner loop.

    With `masked` some tokens do not see some of the keys, else all see all.
    """
    k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref = refs
    accs, old_max, old_sum = carry
    key = block * shape.tiles.block_k + _iota(shape.tiles.block_k)
    # Page ids, keys and values that no token of the tile sees are not read: they may be anything.
    seen = (key >= start) & (key < end) if masked else None
    page = backend.load(table_ref, (row, key >> shape.page_bits), mask=seen)
    page = jnp.clip(page, 0, shape.num_pages - 1)
    slot = key & (shape.page_size - 1)

    scores = jnp.zeros((shape.tiles.block_q, shape.tiles.block_k), jnp.float32)
    for part, q in zip(shape.parts, queries, strict=True):
        index = (page[:, None], kv_head, slot[:, None], _columns(part))
        k = backend.load(k_ref, index, mask=_mask(seen, part, shape))
        k = k.astype(shape.product_dtype)
        scores += backend.dot(q, k, trans_b=True, interpret=shape.interpret)
    if k_scales_ref is not None:
        scores *= backend.load(k_scales_ref, (page, kv_head, slot), mask=seen)[None, :]
    scores, factor = _capped(scores, shape)
    if masked:
        distance = positions[:, None] - key[None, :]
        visible = distance >= 0
        if shape.sliding_window is not None:
            visible &= distance < shape.sliding_window
        scores = jnp.where(visible, scores, UNSEEN)

    row_max = jnp.maximum(old_max, scores.max(1) * factor)
    weights = backend.exp2(scores * factor - row_max[:, None], interpret=shape.interpret)
    rescale = backend.exp2(old_max - row_max, interpret=shape.interpret)
    row_sum = old_sum * rescale + weights.sum(1)
    if v_scales_ref is not None:
        weights *= backend.load(v_scales_ref, (page, kv_head, slot), mask=seen)[None, :]
    weights = weights.astype(shape.value_dtype)
    new = []
    for part, acc in zip(shape.parts, accs, strict=True):
        index = (page[:, None], kv_head, slot[:, None], _columns(part))
        v = backend.load(v_ref, index, mask=_mask(seen, part, shape))
        product = backend.dot(weights, v.astype(shape.value_dtype), interpret=shape.interpret)
        new.append(acc * rescale[:, None] + product)
    return tuple(new), row_max, row_sum


def _capped(scores: Array, shape: _Shape) -> tuple[Array, float]:
    """Bound the scores if asked to; they still have to be multiplied by the factor returned.

    The factor scales them and turns them to base 2. It is left to the exponent, where it is part
    of one multiply-add.
    """
    cap = shape.logit_softcap
    if cap is None:
        return scores, shape.scale * LOG2E
    # tanh(x) = 1 - 2 / (1 + exp(2 x)): ten times as fast as the library's, and off by 1e-7.
    power = backend.exp2(scores * (2 * LOG2E * shape.scale / cap), interpret=shape.interpret)
    return 1 - 2 * backend.reciprocal(1 + power, interpret=shape.interpret), cap * LOG2E


def _rows(tokens: Array, heads: Array, part: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Index [rows, columns] of an array [T, N, H]."""
    return tokens[:, None], heads[:, None], _columns(part)


def _columns(part: tuple[int, int]) -> Array:
    start, width = part
    return (start + _iota(width))[None, :]


def _mask(rows: Array | None, part: tuple[int, int], shape: _Shape) -> Array | None:
    """Where both the row (None: all) and the column exist; None if all of them do."""
    start, width = part
    columns = _columns(part) < shape.head_dim if start + width > shape.head_dim else None
    if rows is None:
        return columns
    rows = jnp.broadcast_to(rows[:, None], (rows.shape[0], width))
    return rows if columns is None else rows & columns


def _iota(n: int) -> Array:
    return lax.iota(jnp.int32, n)
