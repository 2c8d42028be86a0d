"""How prefill is cut up: what is static in a call, and the tokens and keys of one tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.softmax import ROWS, ScoreRule
from pallas_kernels.mosaic.tiles import MosaicPrefillTiles
from pallas_kernels.shapes import Array

CONSUMERS = 2
"""Warpgroups that compute."""


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
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


@dataclass(frozen=True)
class Tile:
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
    def read(cls, work_ref, index, shape: PrefillShape) -> Tile:
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
