"""Where the tokens of a step belong: the metadata that every attention implementation reads.

A step packs rows (sequences) of unequal length behind each other in one axis of `T` tokens. Rows of
one token come first, so that they can be computed side by side; longer rows (chunks of prompts)
follow and are computed in tiles of consecutive tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.shapes import Array, Int


class RaggedBatch(NamedTuple):
    """Rows of a step and their pages, padded to fixed shapes.

    Attributes:
        page_table: int32 [B, P]. Pages of each row in order; slots behind the last page in use may
            hold anything.
        seq_lens: int32 [B]. Keys visible to the row's last token: tokens cached before this step
            plus those of this step. 0 for unused rows.
        query_start_loc: int32 [B + 1]. Row i owns tokens [query_start_loc[i],
            query_start_loc[i + 1]); unused rows are empty.
        num_decode_rows: int32 []. Rows [0, num_decode_rows) have exactly one token: row i has
            token i. Only where attention is told of a `max_query_len`, they may have up to so many.
        num_rows: int32 []. Rows in use.
    """

    page_table: Array
    seq_lens: Array
    query_start_loc: Array
    num_decode_rows: Array
    num_rows: Array


def slot_coordinates(slot_mapping: Int[Array, " T"], page_size: int) -> tuple[Array, Array]:
    """Split slots (page * page_size + offset) into pages and offsets, both int32 [T]."""
    return slot_mapping // page_size, slot_mapping % page_size


def tile_starts(batch: RaggedBatch, block_q: int) -> Int[Array, " B_plus_1"]:
    """Number the tiles of `block_q` consecutive tokens that cover the rows behind the decode rows.

    Returns int32 [B + 1]: row i owns tiles [starts[i], starts[i+1]); decode rows own none.
    """
    lengths = jnp.diff(batch.query_start_loc)
    is_chunk = jnp.arange(lengths.shape[0]) >= batch.num_decode_rows
    tiles = jnp.where(is_chunk, -(-lengths // block_q), 0)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles).astype(jnp.int32)])
