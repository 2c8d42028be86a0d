"""Which tokens each tile of prefill has, in jnp: layers of a step share what XLA makes of it."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Int


def plan_tiles(
    batch: RaggedBatch, num_tokens: int, tile_tokens: int, *, fill: bool
) -> Int[Array, "tiles 6"]:
    """List the tiles of a step, last ones first, for those see most keys.

    Tiles start at multiples of 8 tokens of the packed axis, since TMA brings and takes swizzled
    tiles in units of 8 rows; the first tile of a row may start with tokens of the row before, which
    it computes in vain. With `fill`, tokens of no chunk get tiles without keys, which makes their
    outputs zero.

    Returns:
        int32 [tiles, 6]: the tile's row; its first token / 8; the half-open range of its tokens,
        counted from there, that belong to the row (empty where there is no tile); the position of
        the first token; the row's keys, 0 where there are none.
    """
    B = batch.seq_lens.shape[0]
    starts = batch.query_start_loc
    # Segments: tokens in front of all chunks, the rows that are chunks, tokens behind all rows.
    rows = jnp.arange(B, dtype=jnp.int32)
    is_chunk = (rows >= batch.num_decode_rows) & (rows < batch.num_rows)
    end = jnp.take(starts, batch.num_rows)
    lengths = jnp.concatenate(
        [
            jnp.take(starts, batch.num_decode_rows)[None],
            jnp.where(is_chunk, jnp.diff(starts), 0),
            (num_tokens - end)[None],
        ]
    )
    if not fill:
        lengths = lengths.at[jnp.array([0, B + 1])].set(0)
    firsts = jnp.concatenate([jnp.zeros(1, jnp.int32), starts[:-1], end[None]])
    lead = firsts % 8
    num_tiles = jnp.where(lengths > 0, -(-(lead + lengths) // tile_tokens), 0)
    tiles_before = jnp.cumsum(num_tiles).astype(jnp.int32)
    tile = jnp.arange(max_tiles(num_tokens, B, tile_tokens) - 1, -1, -1, dtype=jnp.int32)
    segment = jnp.searchsorted(tiles_before, tile, side="right")
    used, segment = segment < B + 2, jnp.minimum(segment, B + 1)
    offset = (tile - tiles_before[segment] + num_tiles[segment]) * tile_tokens
    start = jnp.maximum(lead[segment] - offset, 0)
    stop = jnp.clip(lead[segment] + lengths[segment] - offset, 0, tile_tokens)
    row = jnp.clip(segment - 1, 0, B - 1)
    has_keys = (segment > 0) & (segment <= B)
    seq_len = jnp.where(has_keys, batch.seq_lens[row], 0)
    columns = [
        row,
        firsts[segment] // 8 + offset // 8,
        start,
        jnp.where(used, stop, start),
        seq_len - lengths[segment] - lead[segment] + offset,
        seq_len,
    ]
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def max_tiles(num_tokens: int, max_rows: int, tile_tokens: int) -> int:
    """Return the most tiles that a step of `num_tokens` tokens in `max_rows` rows has."""
    # A segment of n tokens has at most (7 + n + tile_tokens - 1) / tile_tokens.
    segments = min(num_tokens, max_rows + 2)
    return (num_tokens + segments * (tile_tokens + 6)) // tile_tokens
