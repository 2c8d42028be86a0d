"""How paged prefill is cut up: what is static in a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.tiles import PrefillTiles

MIN_PART = 16
"""Columns of the narrowest matrix product."""

MAX_FLOAT32_PART = 64
"""Columns of the widest product in float32, whose operands are split in registers: wider ones do
not fit there."""


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
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
