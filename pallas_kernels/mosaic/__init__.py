"""The Hopper kernels: Mosaic GPU, with TMA, wgmma and warpgroups that load or compute.

Twins of the portable kernels in `pallas_kernels.triton`, for what `refusal` does not refuse. Arrays
in, arrays out; the entry in `pallas_kernels.attention` decides who computes.
"""

from pallas_kernels.mosaic.decode import paged_decode
from pallas_kernels.mosaic.prefill import paged_prefill
from pallas_kernels.mosaic.support import refusal
from pallas_kernels.mosaic.tiles import (
    MosaicDecodeTiles,
    MosaicPrefillTiles,
    default_decode_tiles,
    default_prefill_tiles,
)

__all__ = [
    "MosaicDecodeTiles",
    "MosaicPrefillTiles",
    "default_decode_tiles",
    "default_prefill_tiles",
    "paged_decode",
    "paged_prefill",
    "refusal",
]
