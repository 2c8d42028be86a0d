"""Paged decode: rows of one or a few tokens, each attending to all of its pages.

Knows rows, pages and tiles; knows nothing of devices. One source for every GPU that Pallas' Triton
lowering has.

A row's keys are divided among `S` programs per key/value head, since one program alone cannot draw
on the whole memory bandwidth (flash-decoding, arXiv:2311.01282). Each keeps the running softmax of
FlashAttention (arXiv:2205.14135, algorithm 1) over its own keys; a second kernel puts the parts
together:

    keys of a row     0 ...... [first visible ............................. seq_len)
    programs                   [ split 0 | split 1 | split 2 )  split 3 has nothing to do
    combine                    out = Σ exp(max_s - max) acc_s / Σ exp(max_s - max) sum_s
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Float
from pallas_kernels.tiles import DecodeTiles

LOG2E = 1.4426950408889634
"""The softmax is taken to base 2: that is the exponential which the hardware has."""

NO_KEY = -1e30
"""Maximum of no scores. Finite, so that the difference of two is no NaN."""

MIN_ROWS = 16
"""Rows of the smallest matrix product."""

COMBINED = 16
"""Splits that are added up in one go. Fixed, and so is the order of all additions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """What is static in a call.

    Attributes:
        group: Query heads per key/value head, G.
        head_dim: H.
        page_size: Tokens per page.
        num_pages: Pages of the pool.
        max_keys: Keys that a row of the page table can hold.
        max_query_len: Most tokens of a row.
        rows_are_tokens: Row i has token i and no other, and there are as many rows as tokens.
        scale: Multiplies the scores.
        sliding_window: Keys visible to a token; None for all.
        logit_softcap: Bound of the scores.
        block_k: Keys computed side by side.
        split_blocks: Blocks of a split, which then starts at multiples of as many; None: the row's
            blocks are divided evenly.
        min_split_blocks: Fewer are not worth a split when they are divided evenly.
        num_splits: S.
    """

    group: int
    head_dim: int
    page_size: int
    num_pages: int
    max_keys: int
    max_query_len: int
    rows_are_tokens: bool
    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    block_k: int
    split_blocks: int | None
    min_split_blocks: int
    num_splits: int

    @property
    def padded_dim(self) -> int:
        return pl.next_power_of_2(self.head_dim)

    @property
    def query_rows(self) -> int:
        """Tokens × heads that share a key/value head, padded to what a matrix product takes."""
        return max(MIN_ROWS, pl.next_power_of_2(self.max_query_len * self.group))


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
    k_scales: Float[Array, "num_pages K page_size"] | None = None,
    v_scales: Float[Array, "num_pages K page_size"] | None = None,
    max_query_len: int = 1,
    deterministic: bool = False,
    tiles: DecodeTiles,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Return attention of the tokens of rows [0, num_decode_rows); zeros for all other tokens.

    The same as `pallas_kernels.paged_attention` for these rows. Pages are read in place, and only
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
        deterministic: Divide a row's keys at multiples of `tiles.split_len` instead of evenly, so
            that a row's result is bitwise the same whatever B, P and the other rows are.
        tiles: Sizes of the blocks.
        interpret: Run on any device, slowly, for tests.

    Returns:
        [T, N, H] in q's dtype.
    """
    T, N, H = q.shape
    num_pages, K, page_size, _ = k_pages.shape
    B, P = batch.page_table.shape
    num_rows = min(B, T)
    max_keys = P * page_size
    shape = _Shape(
        group=N // K,
        head_dim=H,
        page_size=page_size,
        num_pages=num_pages,
        max_keys=max_keys,
        max_query_len=max_query_len,
        rows_are_tokens=max_query_len == 1 and num_rows == T,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        block_k=tiles.block_k,
        split_blocks=tiles.split_len // tiles.block_k if deterministic else None,
        min_split_blocks=max(1, tiles.min_split_len // tiles.block_k),
        num_splits=_count_splits(
            max_keys,
            min(max_keys, (sliding_window or max_keys) + max_query_len - 1),
            num_rows * K,
            tiles,
            deterministic=deterministic,
        ),
    )
    # Where rows are tokens, all tokens are written; else those of no decode row must be zero.
    out = None if shape.rows_are_tokens else jnp.zeros_like(q)
    meta = (batch.page_table, batch.seq_lens, batch.query_start_loc, batch.num_decode_rows[None])
    call = partial(
        pl.pallas_call,
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=interpret,
    )
    inputs = (q, k_pages, v_pages, k_scales, v_scales, *meta)
    if shape.num_splits == 1:
        return call(
            partial(_whole_kernel, shape=shape),
            grid=(num_rows, K),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            input_output_aliases={} if out is None else {_num_arrays(inputs, sinks): 0},
            name="paged_decode",
        )(*inputs, sinks, out)

    M = max_query_len * (N // K)
    parts = call(
        partial(_split_kernel, shape=shape),
        grid=(num_rows, K, shape.num_splits),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, K, shape.num_splits, M, H), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, K, shape.num_splits, M), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, K, shape.num_splits, M), jnp.float32),
        ),
        name="paged_decode_splits",
    )(*inputs)
    inputs = (*parts, *meta[1:])
    return call(
        partial(_combine_kernel, shape=shape),
        grid=(num_rows * max_query_len, N),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={} if out is None else {_num_arrays(inputs, sinks): 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="paged_decode_combine",
    )(*inputs, sinks, out)


def _num_arrays(*inputs: Any) -> int:
    return len(jax.tree.leaves(inputs))


def _count_splits(
    max_keys: int, most_seen: int, num_programs: int, tiles: DecodeTiles, *, deterministic: bool
) -> int:
    """Return S, from shapes alone.

    Args:
        max_keys: Keys that a row can have.
        most_seen: Those of them that its tokens can see.
        num_programs: Programs without splits.
        tiles: Sizes.
        deterministic: Splits start at multiples of `tiles.split_len`.
    """
    if deterministic:
        # What is seen may start anywhere in its first split.
        touched = (most_seen + tiles.split_len - 2) // tiles.split_len + 1
        return min(pl.cdiv(max_keys, tiles.split_len), touched)
    wanted = tiles.num_splits or pl.cdiv(tiles.num_programs, num_programs)
    return max(1, min(wanted, pl.cdiv(most_seen, tiles.min_split_len)))


@dataclasses.dataclass(frozen=True)
class _Row:
    """The keys and tokens of one row, traced scalars; a row that is not in use has none.

    Attributes:
        index: The row.
        first_token: Index of its first token.
        num_tokens: Tokens.
        seq_len: Keys.
        first_block: The first block of keys that its tokens see.
        end_block: Behind the last.
        origin: Block at which split 0 starts.
        split_blocks: Blocks of a split.
    """

    index: Array
    first_token: Array
    num_tokens: Array
    seq_len: Array
    first_block: Array
    end_block: Array
    origin: Array
    split_blocks: Array | int

    @classmethod
    def read(cls, index, seq_lens_ref, starts_ref, num_rows_ref, shape: _Shape) -> _Row:
        first_token = starts_ref[index]
        used = index < num_rows_ref[0]
        num_tokens = jnp.where(used, starts_ref[index + 1] - first_token, 0)
        num_tokens = jnp.minimum(num_tokens, shape.max_query_len)
        # More keys than the table holds would lead behind its end.
        seq_len = jnp.where(num_tokens > 0, jnp.minimum(seq_lens_ref[index], shape.max_keys), 0)
        first_block = jnp.int32(0)
        if shape.sliding_window is not None:
            oldest = seq_len - num_tokens - shape.sliding_window + 1
            first_block = jnp.maximum(oldest, 0) // shape.block_k
        end_block = pl.cdiv(seq_len, shape.block_k)
        if shape.split_blocks is None:
            even = pl.cdiv(end_block - first_block, shape.num_splits)
            origin, split_blocks = first_block, jnp.maximum(even, shape.min_split_blocks)
        else:
            split_blocks = shape.split_blocks
            origin = first_block // split_blocks * split_blocks
        if shape.rows_are_tokens:
            first_token = index
        return cls(
            index, first_token, num_tokens, seq_len, first_block, end_block, origin, split_blocks
        )

    def split(self, index) -> tuple[Array, Array]:
        """Return the half-open range of blocks of a split; empty for one the row does not reach."""
        start = self.origin + index * self.split_blocks
        end = jnp.minimum(start + self.split_blocks, self.end_block)
        return jnp.maximum(start, self.first_block), end

    @property
    def num_splits(self) -> Array:
        """Splits that the row reaches."""
        return pl.cdiv(self.end_block - self.origin, self.split_blocks)


def _split_kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,
    k_scales_ref,  # [num_pages, K, page_size] or None
    v_scales_ref,
    table_ref,  # [B, P]
    seq_lens_ref,  # [B]
    starts_ref,  # [B + 1]
    num_rows_ref,  # [1]
    acc_ref,  # [B, K, S, M, H]
    max_ref,  # [B, K, S, M]
    sum_ref,
    *,
    shape: _Shape,
):
    """Attend one row's tokens to the keys of one split of one head."""
    row_id, head, split = (pl.program_id(axis) for axis in range(3))
    row = _Row.read(row_id, seq_lens_ref, starts_ref, num_rows_ref, shape)
    start, end = row.split(split)
    refs = (q_ref, k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref)
    acc, row_max, row_sum = _attend(row, start, end, head, *refs, shape=shape)
    m, d = _iota(shape.query_rows), _iota(shape.padded_dim)
    # Nobody reads the parts of splits that a row does not reach.
    used = (m < row.num_tokens * shape.group) & (start < end)
    plgpu.store(max_ref.at[row_id, head, split, m], row_max, mask=used)
    plgpu.store(sum_ref.at[row_id, head, split, m], row_sum, mask=used)
    used = used[:, None] & (d < shape.head_dim)[None, :]
    plgpu.store(acc_ref.at[row_id, head, split, m[:, None], d[None, :]], acc, mask=used)


def _whole_kernel(
    q_ref,
    k_ref,
    v_ref,
    k_scales_ref,
    v_scales_ref,
    table_ref,
    seq_lens_ref,
    starts_ref,
    num_rows_ref,
    sinks_ref,  # [N] or None
    _,  # `out_ref`, or None
    out_ref,  # [T, N, H]
    *,
    shape: _Shape,
):
    """Attend one row's tokens to all of its keys of one head: `_split_kernel` without parts."""
    row_id, head = pl.program_id(0), pl.program_id(1)
    row = _Row.read(row_id, seq_lens_ref, starts_ref, num_rows_ref, shape)
    refs = (q_ref, k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref)
    start, end = row.first_block, row.end_block
    acc, row_max, row_sum = _attend(row, start, end, head, *refs, shape=shape)
    m, d = _iota(shape.query_rows), _iota(shape.padded_dim)
    num_tokens = 1 if shape.rows_are_tokens else row.num_tokens
    used = m < num_tokens * shape.group
    heads = head * shape.group + m % shape.group
    if sinks_ref is not None:
        sinks = plgpu.load(sinks_ref.at[heads], mask=used, other=0.0)
        acc, row_sum = _add_sink(acc, row_max, row_sum, sinks)
    acc = acc / jnp.where(row_sum > 0, row_sum, 1.0)[:, None]
    tokens = row.first_token + m // shape.group
    used = used[:, None] & (d < shape.head_dim)[None, :]
    out_ref = out_ref.at[tokens[:, None], heads[:, None], d[None, :]]
    plgpu.store(out_ref, acc.astype(out_ref.dtype), mask=used)


def _combine_kernel(
    acc_ref,  # [B, K, S, M, H]
    max_ref,  # [B, K, S, M]
    sum_ref,
    seq_lens_ref,  # [B]
    starts_ref,  # [B + 1]
    num_rows_ref,  # [1]
    sinks_ref,  # [N] or None
    _,  # `out_ref`, or None
    out_ref,  # [T, N, H]
    *,
    shape: _Shape,
):
    """Put the splits of one token and one query head together."""
    row_id, token = pl.program_id(0) // shape.max_query_len, pl.program_id(0) % shape.max_query_len
    head = pl.program_id(1)
    row = _Row.read(row_id, seq_lens_ref, starts_ref, num_rows_ref, shape)
    in_row = token < row.num_tokens
    kv_head, m = head // shape.group, token * shape.group + head % shape.group
    d = _iota(shape.padded_dim)
    in_head = d < shape.head_dim

    def body(i, carry):
        acc, old_max, old_sum = carry
        s = i * COMBINED + _iota(COMBINED)
        used = s < row.num_splits
        part_max = plgpu.load(max_ref.at[row_id, kv_head, s, m], mask=used, other=NO_KEY)
        part_sum = plgpu.load(sum_ref.at[row_id, kv_head, s, m], mask=used, other=0.0)
        part = plgpu.load(
            acc_ref.at[row_id, kv_head, s[:, None], m, d[None, :]],
            mask=used[:, None] & in_head[None, :],
            other=0.0,
        )  # [COMBINED, H]
        new_max = jnp.maximum(old_max, part_max.max())
        weight, rescale = jnp.exp2(part_max - new_max), jnp.exp2(old_max - new_max)
        acc = acc * rescale + (part * weight[:, None]).sum(0)
        return acc, new_max, old_sum * rescale + (part_sum * weight).sum()

    num_steps = jnp.where(in_row, pl.cdiv(row.num_splits, COMBINED), 0)
    state = (jnp.zeros((shape.padded_dim,), jnp.float32), jnp.float32(NO_KEY), jnp.float32(0))
    acc, row_max, row_sum = lax.fori_loop(0, num_steps, body, state)
    if sinks_ref is not None:
        acc, row_sum = _add_sink(acc, row_max, row_sum, sinks_ref[head])
    acc = acc / jnp.where(row_sum > 0, row_sum, 1.0)
    used = in_head if shape.rows_are_tokens else in_head & in_row
    out_ref = out_ref.at[row.first_token + token, head, d]
    plgpu.store(out_ref, acc.astype(out_ref.dtype), mask=used)


def _attend(
    row: _Row,
    start: Array,
    end: Array,
    head: Array,
    q_ref,
    k_ref,
    v_ref,
    k_scales_ref,
    v_scales_ref,
    table_ref,
    *,
    shape: _Shape,
) -> tuple[Array, Array, Array]:
    """Attend a row's tokens to the blocks [start, end) of one key/value head.

    Returns:
        Values summed with their weights [M, H], the maximum [M] that the weights are relative to,
        and the weights' sum [M]: float32, tokens × heads padded to `shape.query_rows`.
    """
    m, d = _iota(shape.query_rows), _iota(shape.padded_dim)
    in_head = (d < shape.head_dim)[None, :]
    token, heads = m // shape.group, head * shape.group + m % shape.group
    q = plgpu.load(
        q_ref.at[(row.first_token + token)[:, None], heads[:, None], d[None, :]],
        mask=(token < row.num_tokens)[:, None] & in_head,
        other=0.0,
    )  # [M, H]
    dtype = _product_dtype(q_ref.dtype, k_ref.dtype)
    q = q.astype(dtype)
    positions = row.seq_len - row.num_tokens + token
    oldest = jnp.int32(0)
    if shape.sliding_window is not None:
        oldest = jnp.maximum(row.seq_len - row.num_tokens - shape.sliding_window + 1, 0)

    def body(block, carry):
        acc, old_max, old_sum = carry
        s = block * shape.block_k + _iota(shape.block_k)
        # Page ids, keys and values that no token sees are not read: they may be anything.
        seen = (s >= oldest) & (s < row.seq_len)
        pages = plgpu.load(table_ref.at[row.index, s // shape.page_size], mask=seen, other=0)
        pages = jnp.clip(pages, 0, shape.num_pages - 1)
        slots = s % shape.page_size
        tile = (pages[:, None], head, slots[:, None], d[None, :])
        in_tile = seen[:, None] & in_head
        k = plgpu.load(k_ref.at[tile], mask=in_tile, other=_zero(k_ref)).astype(dtype)
        scores = _dot(q, k.T) * shape.scale  # [M, block_k]
        if k_scales_ref is not None:
            scores *= plgpu.load(k_scales_ref.at[pages, head, slots], mask=seen, other=0.0)[None]
        if shape.logit_softcap is not None:
            scores = shape.logit_softcap * jnp.tanh(scores / shape.logit_softcap)
        distance = positions[:, None] - s[None, :]
        visible = distance >= 0
        if shape.sliding_window is not None:
            visible &= distance < shape.sliding_window
        scores = jnp.where(visible, scores * LOG2E, -jnp.inf)
        new_max = jnp.maximum(old_max, scores.max(1))
        weights = jnp.exp2(scores - new_max[:, None])
        rescale = jnp.exp2(old_max - new_max)
        new_sum = old_sum * rescale + weights.sum(1)
        if v_scales_ref is not None:
            scales = plgpu.load(v_scales_ref.at[pages, head, slots], mask=seen, other=0.0)
            weights *= scales[None]
        v = plgpu.load(v_ref.at[tile], mask=in_tile, other=_zero(v_ref)).astype(dtype)
        return acc * rescale[:, None] + _dot(weights.astype(dtype), v), new_max, new_sum

    state = (
        jnp.zeros((shape.query_rows, shape.padded_dim), jnp.float32),
        jnp.full((shape.query_rows,), NO_KEY, jnp.float32),
        jnp.zeros((shape.query_rows,), jnp.float32),
    )
    return lax.fori_loop(start, end, body, state)


def _add_sink(acc: Array, row_max: Array, row_sum: Array, sink: Array) -> tuple[Array, Array]:
    """Count one more score whose value is zero; of one row, or of [M] rows."""
    sink = sink.astype(jnp.float32) * LOG2E
    new_max = jnp.maximum(row_max, sink)
    rescale = jnp.exp2(row_max - new_max)
    scaled = acc * (rescale[:, None] if rescale.ndim else rescale)
    return scaled, row_sum * rescale + jnp.exp2(sink - new_max)


def _product_dtype(query_dtype: Any, page_dtype: Any) -> Any:
    """The type that queries, keys and weights are multiplied in: 1-byte pages become queries'."""
    if jnp.dtype(page_dtype).itemsize == 1:
        return query_dtype
    return jnp.promote_types(query_dtype, page_dtype)


def _dot(a: Array, b: Array) -> Array:
    """Multiply matrices with a float32 sum; float32 ones without rounding them to tf32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _zero(ref) -> Array:
    return jnp.zeros((), ref.dtype)


def _iota(n: int) -> Array:
    return lax.iota(jnp.int32, n)
