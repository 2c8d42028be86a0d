"""From keys of a row to places in the pool of pages, and the TMA copies that bring them.

Knows the page table and copies; knows nothing of attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ring import Kind, Ring
from pallas_kernels.shapes import Array

MOST_PLACES = 8
"""Pages that a producer holds in registers, of which it has few: half as many where there are more
than one such part of a block."""


@dataclass(frozen=True)
class Pages:
    """The pages of one row and one key/value head.

    A copy brings `copy_len` consecutive keys, which stand in one page. A block may reach beyond
    what the row's tokens see; its copies then bring the nearest keys that they do see again, since
    page-table slots in front and behind may hold anything. Their scores are masked.

    Attributes:
        table: Reference to [B, P].
        row: The row.
        head: The key/value head.
        oldest: First key that any of the tokens sees.
        seq_len: Keys of the row, more than `oldest`.
        copy_len: A divisor of the page size and of the ring's block, a multiple of 8.
        page_size: Tokens per page.
    """

    table: Any
    row: Array
    head: Array
    oldest: Array
    seq_len: Array
    copy_len: int
    page_size: int

    def locate(self, first_key: Array, copies: range) -> list[tuple[Array, Array]]:
        """Return page and offset for some copies of the block that starts at `first_key`."""
        first = lax.div(first_key, jnp.int32(self.copy_len))
        least = lax.div(self.oldest, jnp.int32(self.copy_len))
        most = lax.div(self.seq_len - 1, jnp.int32(self.copy_len))
        copies_per_page = jnp.int32(self.page_size // self.copy_len)
        places = []
        for i in copies:
            copy = jnp.clip(first + i, least, most)
            page = self.table[self.row, lax.div(copy, copies_per_page)]
            # Written as a product, from which the compiler knows that it starts a tile.
            places.append((page, lax.rem(copy, copies_per_page) * self.copy_len))
        return places

    def copy(
        self,
        pages: Any,
        copies: range,
        places: list[tuple[Array, Array]],
        ring: Ring,
        kind: Kind,
        step: Array,
    ) -> None:
        """Start some copies of a block into the step's slot of the ring."""
        slot = ring.slot(step)
        target, barrier = {"k": ring.k, "v": ring.v}[kind].at[slot], ring.full[kind].at[slot]
        for i, (page, offset) in zip(copies, places, strict=True):
            source = pages.at[page, self.head]
            if self.copy_len < self.page_size:
                source = source.at[pl.ds(offset, self.copy_len)]
            part = target.at[i * self.copy_len : (i + 1) * self.copy_len]
            plgpu.copy_gmem_to_smem(source, part, barrier)


def load_blocks(
    pages: Pages, k_pages: Any, v_pages: Any, ring: Ring, first_key: Array, num_steps: Array
) -> None:
    """Be the producer: bring `num_steps` blocks of keys and values, from `first_key` on."""
    _, block_k, _ = ring.k.shape
    num_copies = block_k // pages.copy_len
    size = MOST_PLACES if num_copies == MOST_PLACES else MOST_PLACES // 2
    parts = [range(i, min(i + size, num_copies)) for i in range(0, num_copies, size)]

    @pl.loop(0, num_steps)
    def _(step):
        first = first_key + step * block_k
        # The table is read while the slot is still in use.
        places = pages.locate(first, parts[0])
        for kind, source in (("k", k_pages), ("v", v_pages)):
            ring.wait_free(kind, step)
            pages.copy(source, parts[0], places, ring, kind, step)
            for part in parts[1:]:
                pages.copy(source, part, pages.locate(first, part), ring, kind, step)

    ring.drain(num_steps)
