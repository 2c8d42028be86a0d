"""How paged decode is cut up: what is static in a call, and which keys each split has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic.softmax import ROWS, ScoreRule
from pallas_kernels.mosaic.tiles import MosaicDecodeTiles
from pallas_kernels.shapes import Array, Int


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
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


def plan_splits(
    seq_lens: Int[Array, " rows"], lengths: Int[Array, " rows"], shape: DecodeShape
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


def even_splits(most_seen: int, num_programs: int, tiles: MosaicDecodeTiles) -> int:
    """Return S for rows that divide their keys evenly; `num_programs` is their number for S = 1."""
    useful = -(-most_seen // tiles.min_split_len)
    return max(1, min(useful, -(-tiles.num_programs // num_programs)))


def fixed_splits(most_seen: int, max_keys: int, split_len: int) -> int:
    """Return S for splits that start at multiples of `split_len`."""
    # What is seen may start anywhere in its first split.
    touched = (most_seen + split_len - 2) // split_len + 1
    return min(-(-max_keys // split_len), touched)
