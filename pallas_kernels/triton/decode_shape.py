"""How paged decode is cut up: what is static, and what a program reads of its row."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.shapes import Array

MIN_ROWS = 16
"""Rows of the smallest matrix product."""


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
        tile_tokens: Tokens of a row that one program computes; together with the heads that share
            a key/value head they are the M rows of its matrix products.
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
    tile_tokens: int
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
        """M, padded to what a product takes."""
        return max(MIN_ROWS, pl.next_power_of_2(self.tile_tokens * self.group))

    @property
    def num_tiles(self) -> int:
        """Tiles of the tokens of a row."""
        return pl.cdiv(self.max_query_len, self.tile_tokens)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The rows of a program's matrix products: int32 and bool arrays [M].

    Attributes:
        tokens: Token of the row, counted from its first.
        heads: Query head.
        used: Where there is such a token.
    """

    tokens: Array
    heads: Array
    used: Array

    @classmethod
    def of(cls, index: Array, head: Array, num_tokens: Array | int, shape: DecodeShape) -> Tile:
        m = iota(shape.padded_rows)
        tokens = index * shape.tile_tokens + m // shape.group
        used = (m < shape.tile_tokens * shape.group) & (tokens < num_tokens)
        return cls(tokens, head * shape.group + m % shape.group, used)


@dataclasses.dataclass(frozen=True)
class Row:
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
    def read(cls, index: Array, seq_lens_ref, starts_ref, num_rows_ref, shape: DecodeShape) -> Row:
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


def iota(n: int) -> Array:
    """Return int32 [0, n)."""
    return lax.iota(jnp.int32, n)
