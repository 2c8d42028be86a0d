"""Attention over a paged cache, and writing it: arrays in, arrays out; no request and no model.

Each operation has one entry that picks an implementation, and a plain jnp reference of the same
signature that every other implementation is compared with.
"""

from pallas_kernels.attention import paged_attention
from pallas_kernels.kv_pages import KVPages, has_scales
from pallas_kernels.kv_write import write_kv
from pallas_kernels.ragged_batch import RaggedBatch, slot_coordinates, tile_starts

__all__ = [
    "KVPages",
    "RaggedBatch",
    "has_scales",
    "paged_attention",
    "slot_coordinates",
    "tile_starts",
    "write_kv",
]
