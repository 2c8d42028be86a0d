"""Tile sizes of the GPU kernels: records that refuse what cannot work, and where they come from.

Measured sizes come first, from the table beside this file that `python -m pallas_kernels.autotune`
writes; a case that was never measured gets a default by rule.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import resources
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.capability import GENERATIONS, SCALED_DTYPES

TABLE = "tiles.json"
"""The measured sizes, in this package."""

Kernel = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """How prefill is cut up.

    Attributes:
        block_q: Rows of a tile: query tokens times the query heads that share a KV head.
        block_k: Keys per step of the inner loop.
        num_warps: Warps (of 32 threads) that compute a tile.
        num_stages: Steps of the inner loop whose loads are in flight.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        _power_of_two(self, "block_q", 16, 256)
        _power_of_two(self, "block_k", 16, 256)
        _power_of_two(self, "num_warps", 1, 16)
        _between(self, "num_stages", 1, 8)


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """How decode is cut up.

    Attributes:
        block_k: Keys per step of the inner loop.
        num_splits: Most parts that the keys of a row are split into, each computed by itself.
        num_warps: Warps (of 32 threads) that compute a part.
        num_stages: Steps of the inner loop whose loads are in flight.
    """

    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        _power_of_two(self, "block_k", 16, 512)
        _power_of_two(self, "num_splits", 1, 256)
        _power_of_two(self, "num_warps", 1, 16)
        _between(self, "num_stages", 1, 8)


Tiles = PrefillTiles | DecodeTiles


@dataclass(frozen=True, kw_only=True)
class TileKey:
    """What tile sizes depend on.

    Attributes:
        generation: One of `capability.GENERATIONS`.
        head_dim: H.
        dtype: Name of the queries' dtype.
        kv_dtype: Name of the pages' dtype.
    """

    generation: str
    head_dim: int
    dtype: str
    kv_dtype: str

    def __post_init__(self) -> None:
        if self.generation not in GENERATIONS:
            raise ValueError(f"{self.generation=} must be one of {', '.join(GENERATIONS)}")

    @classmethod
    def of(cls, generation: str, head_dim: int, dtype: Any, kv_dtype: Any) -> TileKey:
        """Return the key of these dtypes, however they are written."""
        return cls(
            generation=generation,
            head_dim=head_dim,
            dtype=jnp.dtype(dtype).name,
            kv_dtype=jnp.dtype(kv_dtype).name,
        )


def prefill_tiles(key: TileKey) -> PrefillTiles:
    """Return the measured sizes of prefill for this case, or the default ones."""
    found = measured("prefill", key)
    return found if isinstance(found, PrefillTiles) else default_prefill_tiles(key)


def decode_tiles(key: TileKey) -> DecodeTiles:
    """Return the measured sizes of decode for this case, or the default ones."""
    found = measured("decode", key)
    return found if isinstance(found, DecodeTiles) else default_decode_tiles(key)


def default_prefill_tiles(key: TileKey) -> PrefillTiles:
    """Return sizes that fit the shared memory and registers of every chip of the generation.

    Found by compiling: the largest tiles without spills. What limits is the accumulator, block_q x
    head dim numbers of 32 bits in the registers of all warps, beside the pointers of the keys.
    """
    sizes = partial(PrefillTiles, num_warps=8, num_stages=2)
    wide = key.head_dim > 128
    # Pages of one byte are converted in registers, which then are missing elsewhere.
    scaled = key.kv_dtype in SCALED_DTYPES
    if "float32" in (key.dtype, key.kv_dtype):
        # Multiplied in three passes, from operands that are split in registers.
        # With a window, a cap and sinks a B200 has no registers for 32 rows of more than 192.
        large = wide and not (key.generation == "sm_100" and key.head_dim > 192)
        rows = 32 if large and key.kv_dtype == key.dtype else 16
        # Before Hopper the compiler gives each of 256 threads half as many registers.
        num_warps = 8 if wide or (scaled and key.generation not in ("sm_80", "sm_89")) else 4
        return sizes(block_q=rows, block_k=16, num_warps=num_warps, num_stages=1)
    block_q = 64 if wide or key.generation == "sm_80" else 128
    small = scaled or (wide and key.generation != "sm_90") or key.generation == "sm_120"
    if key.head_dim == 192 and key.generation != "sm_90":
        # Computed as 128 + 64: pointers of both.
        return sizes(block_q=64, block_k=16)
    return sizes(block_q=block_q, block_k=32 if small else 64)


def default_decode_tiles(key: TileKey) -> DecodeTiles:
    """Return sizes that fit the shared memory and registers of every chip of the generation."""
    block_k = 64 if key.head_dim <= 128 else 32
    if key.dtype == "float32":
        block_k //= 2
    num_warps = 8 if key.head_dim > 128 and key.kv_dtype in SCALED_DTYPES else 4
    return DecodeTiles(block_k=block_k, num_splits=16, num_warps=num_warps, num_stages=2)


def measured(kernel: Kernel, key: TileKey) -> Tiles | None:
    """Return the sizes that the committed table has for this case, None if it has none."""
    return _table().get((kernel, key))


def read_table(text: str) -> dict[tuple[Kernel, TileKey], Tiles]:
    """Read what `write_table` wrote.

    Raises:
        ValueError: An entry has sizes that cannot work, or fields that are not known.
    """
    entries: dict[tuple[Kernel, TileKey], Tiles] = {}
    for entry in json.loads(text)["entries"]:
        record = {"prefill": PrefillTiles, "decode": DecodeTiles}.get(entry["kernel"])
        if record is None:
            raise ValueError(f"kernel must be prefill or decode, got {entry['kernel']!r}")
        try:
            entries[entry["kernel"], TileKey(**entry["key"])] = record(**entry["tiles"])
        except TypeError as error:
            raise ValueError(f"tile table entry {entry} cannot be read: {error}") from error
    return entries


def write_table(entries: dict[tuple[Kernel, TileKey], Tiles]) -> str:
    """Return the table as text, in a fixed order so that its changes can be read."""
    rows = [
        {"kernel": kernel, "key": asdict(key), "tiles": asdict(tiles)}
        for (kernel, key), tiles in entries.items()
    ]
    lines = sorted(json.dumps(row) for row in rows)
    body = ",\n  ".join(lines)
    return '{"entries": [\n  ' + body + "\n]}\n" if lines else '{"entries": []}\n'


@cache
def _table() -> dict[tuple[Kernel, TileKey], Tiles]:
    return read_table((resources.files("pallas_kernels") / TABLE).read_text())


def _power_of_two(tiles: Tiles, name: str, least: int, most: int) -> None:
    _between(tiles, name, least, most)
    value = getattr(tiles, name)
    if value & (value - 1):
        raise ValueError(f"{name} must be a power of two, got {value}")


def _between(tiles: Tiles, name: str, least: int, most: int) -> None:
    value = getattr(tiles, name)
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number in [{least}, {most}], got {value!r}")
