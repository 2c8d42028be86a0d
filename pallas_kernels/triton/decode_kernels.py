"""The kernels of paged decode: what one program computes.

Each program keeps the running softmax of FlashAttention (arXiv:2205.14135, algorithm 1) over the
keys of one row, one key/value head and one split, for all tokens of the row and all query heads
that share the key/value head.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.shapes import Array
from pallas_kernels.triton import backend
from pallas_kernels.triton.backend import load, store

LOG2E = 1.4426950408889634
"""The softmax is taken to base 2: that is the exponential which the hardware has."""

NO_KEY = -1e30
"""Maximum of no scores. Finite, so that the difference of two is no NaN."""

MIN_ROWS = 16
"""Rows of the smallest matrix product."""

COMBINED = 16
"""Splits that are added up in one go. Fixed, and so is the order of all additions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
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
        logit_softcap: Bound of the scores; None for none.
        block_k: Keys computed side by side.
        split_blocks: Blocks of a split, which starts at a multiple of as many; None: the blocks
            that a row sees are divided evenly.
        min_split_blocks: Fewest blocks of a split where they are divided evenly.
        num_splits: S.
        interpret: The kernel is interpreted.
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
    interpret: bool

    @property
    def padded_dim(self) -> int:
        """H, padded to what a block may have."""
        return pl.next_power_of_2(self.head_dim)

    @property
    def padded_rows(self) -> int:
        """M, tokens × heads that share a key/value head, padded to what a product takes."""
        return max(MIN_ROWS, pl.next_power_of_2(self.max_query_len * self.group))


@dataclasses.dataclass(frozen=True)
class _Row:
    """The keys and tokens of one row, traced scalars; a row that is not in use has none.

    Attributes:
        index: The row.
        first_token: Index of its first token.
        num_tokens: Tokens.
        seq_len: Keys.
        oldest: The first key that its tokens see.
        first_block: The block of that key.
        end_block: Behind the last block.
        origin: Block at which split 0 starts.
        split_blocks: Blocks of a split.
    """

    index: Array
    first_token: Array
    num_tokens: Array
    seq_len: Array
    oldest: Array
    first_block: Array
    end_block: Array
    origin: Array
    split_blocks: Array | int

    @classmethod
    def read(cls, index: Array, seq_lens_ref, starts_ref, num_rows_ref, shape: DecodeShape) -> _Row:
        first_token = index if shape.rows_are_tokens else starts_ref[index]
        num_tokens = starts_ref[index + 1] - starts_ref[index]
        num_tokens = jnp.minimum(num_tokens, shape.max_query_len)
        num_tokens = jnp.where(index < num_rows_ref[0], num_tokens, 0)
        # A row that claims more keys than the table holds must not lead behind the table's end.
        seq_len = jnp.where(num_tokens > 0, jnp.minimum(seq_lens_ref[index], shape.max_keys), 0)
        oldest = jnp.int32(0)
        if shape.sliding_window is not None:
            oldest = jnp.maximum(seq_len - num_tokens - shape.sliding_window + 1, 0)
        first_block = oldest // shape.block_k
        end_block = pl.cdiv(seq_len, shape.block_k)
        if shape.split_blocks is None:
            even = pl.cdiv(end_block - first_block, shape.num_splits)
            origin, split_blocks = first_block, jnp.maximum(even, shape.min_split_blocks)
        else:
            split_blocks = shape.split_blocks
            origin = first_block // split_blocks * split_blocks
        return cls(
            index=index,
            first_token=first_token,
            num_tokens=num_tokens,
            seq_len=seq_len,
            oldest=oldest,
            first_block=first_block,
            end_block=end_block,
            origin=origin,
            split_blocks=split_blocks,
        )

    def split(self, index: Array) -> tuple[Array, Array]:
        """Return the half-open range of blocks of a split; empty for one the row does not reach."""
        start = self.origin + index * self.split_blocks
        end = jnp.minimum(start + self.split_blocks, self.end_block)
        return jnp.maximum(start, self.first_block), end

    @property
    def num_splits(self) -> Array:
        """Splits that the row reaches."""
        return pl.cdiv(self.end_block - self.origin, self.split_blocks)


def split_kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,  # [num_pages, K, page_size, H]
    k_scales_ref,  # [num_pages, K, page_size] or None
    v_scales_ref,  # [num_pages, K, page_size] or None
    table_ref,  # [B, P]
    seq_lens_ref,  # [B]
    starts_ref,  # [B + 1]
    num_rows_ref,  # [1]
    acc_ref,  # float32 [B, K, S, M, H]
    max_ref,  # float32 [B, K, S, M]
    sum_ref,  # float32 [B, K, S, M]
    *,
    shape: DecodeShape,
) -> None:
    """Attend one row to the keys of one split of one head."""
    index, head, split = (pl.program_id(axis) for axis in range(3))
    row = _Row.read(index, seq_lens_ref, starts_ref, num_rows_ref, shape)
    start, end = row.split(split)
    pages = (k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref)
    acc, row_max, row_sum = _attend(row, start, end, head, q_ref, *pages, shape=shape)
    m, d = iota(shape.padded_rows), iota(shape.padded_dim)
    # Nobody reads the parts of splits that a row does not reach.
    used = (m < row.num_tokens * shape.group) & (start < end)
    store(max_ref, (index, head, split, m), row_max, mask=used)
    store(sum_ref, (index, head, split, m), row_sum, mask=used)
    used = used[:, None] & (d < shape.head_dim)[None, :]
    store(acc_ref, (index, head, split, m[:, None], d[None, :]), acc, mask=used)


def whole_kernel(
    q_ref,  # [T, N, H]
    k_ref,  # [num_pages, K, page_size, H]
    v_ref,  # [num_pages, K, page_size, H]
    k_scales_ref,  # [num_pages, K, page_size] or None
    v_scales_ref,  # [num_pages, K, page_size] or None
    table_ref,  # [B, P]
    seq_lens_ref,  # [B]
    starts_ref,  # [B + 1]
    num_rows_ref,  # [1]
    sinks_ref,  # [N] or None
    _,  # what `out_ref` overwrites, or None
    out_ref,  # [T, N, H]
    *,
    shape: DecodeShape,
) -> None:
    """Attend one row to all of its keys of one head, where there is one split."""
    index, head = pl.program_id(0), pl.program_id(1)
    row = _Row.read(index, seq_lens_ref, starts_ref, num_rows_ref, shape)
    start, end = row.first_block, row.end_block
    pages = (k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref)
    acc, row_max, row_sum = _attend(row, start, end, head, q_ref, *pages, shape=shape)
    m, d = iota(shape.padded_rows), iota(shape.padded_dim)
    num_tokens = 1 if shape.rows_are_tokens else row.num_tokens
    used = m < num_tokens * shape.group
    heads = head * shape.group + m % shape.group
    sinks = None if sinks_ref is None else load(sinks_ref, (heads,), mask=used)
    acc = acc * _final_scale(row_max, row_sum, sinks)[:, None]
    tokens = row.first_token + m // shape.group
    used = used[:, None] & (d < shape.head_dim)[None, :]
    index = (tokens[:, None], heads[:, None], d[None, :])
    store(out_ref, index, acc.astype(out_ref.dtype), mask=used)


def combine_kernel(
    acc_ref,  # float32 [B, K, S, M, H]
    max_ref,  # float32 [B, K, S, M]
    sum_ref,  # float32 [B, K, S, M]
    seq_lens_ref,  # [B]
    starts_ref,  # [B + 1]
    num_rows_ref,  # [1]
    sinks_ref,  # [N] or None
    _,  # what `out_ref` overwrites, or None
    out_ref,  # [T, N, H]
    *,
    shape: DecodeShape,
) -> None:
    """Put the splits of one token and one query head together."""
    index, token = pl.program_id(0) // shape.max_query_len, pl.program_id(0) % shape.max_query_len
    head = pl.program_id(1)
    row = _Row.read(index, seq_lens_ref, starts_ref, num_rows_ref, shape)
    in_row = token < row.num_tokens
    kv_head, m = head // shape.group, token * shape.group + head % shape.group
    d = iota(shape.padded_dim)
    in_head = d < shape.head_dim

    def body(i, carry):
        acc, old_max, old_sum = carry
        s = i * COMBINED + iota(COMBINED)
        used = s < row.num_splits
        stats, part = (index, kv_head, s, m), (index, kv_head, s[:, None], m, d[None, :])
        part_max = jnp.where(used, load(max_ref, stats, mask=used), NO_KEY)
        part_sum = load(sum_ref, stats, mask=used)
        part = load(acc_ref, part, mask=used[:, None] & in_head[None, :])  # [COMBINED, H]
        new_max = jnp.maximum(old_max, part_max.max())
        weights, rescale = jnp.exp2(part_max - new_max), jnp.exp2(old_max - new_max)
        acc = acc * rescale + (part * weights[:, None]).sum(0)
        return acc, new_max, old_sum * rescale + (part_sum * weights).sum()

    num_steps = jnp.where(in_row, pl.cdiv(row.num_splits, COMBINED), 0)
    state = (jnp.zeros((shape.padded_dim,), jnp.float32), jnp.float32(NO_KEY), jnp.float32(0))
    acc, row_max, row_sum = lax.fori_loop(0, num_steps, body, state)
    acc = acc * _final_scale(row_max, row_sum, None if sinks_ref is None else sinks_ref[head])
    used = in_head if shape.rows_are_tokens else in_head & in_row
    store(out_ref, (row.first_token + token, head, d), acc.astype(out_ref.dtype), mask=used)


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
    shape: DecodeShape,
) -> tuple[Array, Array, Array]:
    """Attend a row's tokens to the blocks [start, end) of one key/value head.

    Returns:
        Values summed with their weights [M, H], the maximum [M] that the weights are relative to,
        and the weights' sum [M], all float32.
    """
    m, d = iota(shape.padded_rows), iota(shape.padded_dim)
    in_head = (d < shape.head_dim)[None, :]
    token, heads = m // shape.group, head * shape.group + m % shape.group
    dtype = backend.product_dtype(q_ref.dtype, k_ref.dtype)
    q = load(
        q_ref,
        ((row.first_token + token)[:, None], heads[:, None], d[None, :]),
        mask=(token < row.num_tokens)[:, None] & in_head,
    ).astype(dtype)  # [M, H]
    positions = row.seq_len - row.num_tokens + token

    def body(block, carry):
        acc, old_max, old_sum = carry
        s = block * shape.block_k + iota(shape.block_k)
        # Page ids, keys and values that no token sees are not read: they may be anything.
        seen = (s >= row.oldest) & (s < row.seq_len)
        pages = load(table_ref, (row.index, s // shape.page_size), mask=seen)
        pages, slots = jnp.clip(pages, 0, shape.num_pages - 1), s % shape.page_size
        tile = (pages[:, None], head, slots[:, None], d[None, :])
        in_tile = seen[:, None] & in_head
        k = load(k_ref, tile, mask=in_tile).astype(dtype)  # [block_k, H]
        scores = backend.dot(q, k, trans_b=True, interpret=shape.interpret) * shape.scale
        if k_scales_ref is not None:
            scores *= load(k_scales_ref, (pages, head, slots), mask=seen)[None, :]
        if shape.logit_softcap is not None:
            scores = shape.logit_softcap * jnp.tanh(scores / shape.logit_softcap)
        distance = positions[:, None] - s[None, :]
        visible = distance >= 0
        if shape.sliding_window is not None:
            visible &= distance < shape.sliding_window
        scores = jnp.where(visible, scores * LOG2E, -jnp.inf)  # [M, block_k]
        new_max = jnp.maximum(old_max, scores.max(1))
        weights = jnp.exp2(scores - new_max[:, None])
        rescale = jnp.exp2(old_max - new_max)
        new_sum = old_sum * rescale + weights.sum(1)
        if v_scales_ref is not None:
            weights *= load(v_scales_ref, (pages, head, slots), mask=seen)[None, :]
        v = load(v_ref, tile, mask=in_tile).astype(dtype)
        product = backend.dot(weights.astype(dtype), v, interpret=shape.interpret)
        return acc * rescale[:, None] + product, new_max, new_sum

    state = (
        jnp.zeros((shape.padded_rows, shape.padded_dim), jnp.float32),
        jnp.full((shape.padded_rows,), NO_KEY, jnp.float32),
        jnp.zeros((shape.padded_rows,), jnp.float32),
    )
    return lax.fori_loop(start, end, body, state)


def _final_scale(row_max: Array, row_sum: Array, sink: Array | None) -> Array:
    """Return what summed values are multiplied by; 0 keys give a finite number."""
    if sink is None:
        return 1.0 / jnp.where(row_sum > 0, row_sum, 1.0)
    # One more score, whose value is zero.
    sink = sink.astype(jnp.float32) * LOG2E
    new_max = jnp.maximum(row_max, sink)
    rescale = jnp.exp2(row_max - new_max)
    return rescale / (row_sum * rescale + jnp.exp2(sink - new_max))


def iota(n: int) -> Array:
    """Return int32 [0, n)."""
    return lax.iota(jnp.int32, n)
