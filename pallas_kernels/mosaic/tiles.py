"""Tile sizes of the Mosaic GPU kernels: records that refuse what a Hopper chip cannot hold."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_BYTES = 227 * 1024
"""Shared memory that one block of a Hopper chip can have (CUDA C++ programming guide, table 27)."""

RESERVED_BYTES = 5 * 1024
"""Kept for barriers, alignment of the buffers and the compiler's scratch for reductions."""

ROWS = 64
"""Rows that one warpgroup multiplies at a time."""

MAX_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class MosaicPrefillTiles:
    """How Mosaic prefill is cut up.

    A block of the grid has two warpgroups that compute 64 rows each and one that loads.

    Attributes:
        head_dim: H that the sizes are for.
        block_k: Keys per step, a multiple of 64.
        num_stages: Steps whose keys and values are in shared memory at once, at least 2.
    """

    head_dim: int
    block_k: int
    num_stages: int

    def __post_init__(self) -> None:
        # Accumulator, scores and weights in the 240 registers that a computing thread has.
        registers = self.head_dim // 2 + self.block_k // 2 + self.block_k // 4
        if registers > 200:
            raise ValueError(
                f"head_dim {self.head_dim} and block_k {self.block_k} need {registers} registers a "
                "thread for accumulator, scores and weights, and at most 200 are free for them; "
                "use a smaller block_k"
            )
        _check(self, self.block_k, self.num_stages, self.shared_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, with 16-bit elements."""
        queries = 2 * ROWS * self.head_dim * 2
        return queries + _ring_bytes(self.head_dim, self.block_k, self.num_stages)


@dataclass(frozen=True, kw_only=True)
class MosaicDecodeTiles:
    """How Mosaic decode is cut up.

    A block of the grid has one warpgroup that computes 64 rows and one that loads.

    Attributes:
        head_dim: H that the sizes are for.
        block_k: Keys per step, a multiple of 64.
        num_stages: Steps whose keys and values are in shared memory at once, at least 2.
        num_programs: Blocks of the grid that are wanted to fill the chip.
        min_split_len: Fewer keys are not worth a split.
    """

    head_dim: int
    block_k: int
    num_stages: int
    num_programs: int
    min_split_len: int

    def __post_init__(self) -> None:
        _check(self, self.block_k, self.num_stages, self.shared_bytes)
        for name in ("num_programs", "min_split_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, with 16-bit elements."""
        # float32 outputs take the place of the queries.
        outputs = ROWS * self.head_dim * 4 + 2 * ROWS * 4
        return outputs + _ring_bytes(self.head_dim, self.block_k, self.num_stages)


def default_prefill_tiles(head_dim: int) -> MosaicPrefillTiles:
    """Return the largest sizes that fit registers and shared memory; not measured yet."""
    block_k = 128 if head_dim <= 128 else 64
    stages = {64: 3, 80: 3, 96: 2, 128: 2, 192: 3}.get(head_dim, 2)
    return MosaicPrefillTiles(head_dim=head_dim, block_k=block_k, num_stages=stages)


def default_decode_tiles(head_dim: int) -> MosaicDecodeTiles:
    """Return sizes that keep a multiprocessor's memory pipe full; not measured yet."""
    # 36 KB have to be in flight on each multiprocessor at 4.8 TB/s and 1 µs of latency. What there
    # is beyond that bridges the time in which one block of the grid gives way to the next.
    block_k = 64
    room = SHARED_BYTES - RESERVED_BYTES - ROWS * head_dim * 4 - 2 * ROWS * 4
    return MosaicDecodeTiles(
        head_dim=head_dim,
        block_k=block_k,
        num_stages=min(MAX_STAGES, room // _ring_bytes(head_dim, block_k, 1)),
        num_programs=264,
        min_split_len=256,
    )


def _ring_bytes(head_dim: int, block_k: int, num_stages: int) -> int:
    return 2 * num_stages * block_k * head_dim * 2


def _check(tiles: object, block_k: int, num_stages: int, shared_bytes: int) -> None:
    if block_k < ROWS or block_k % ROWS or block_k > 256:
        raise ValueError(f"block_k must be 64, 128, 192 or 256, got {block_k}")
    if not 2 <= num_stages <= MAX_STAGES:
        raise ValueError(f"num_stages must be 2 to {MAX_STAGES}, got {num_stages}")
    if shared_bytes + RESERVED_BYTES > SHARED_BYTES:
        raise ValueError(
            f"{tiles} needs {shared_bytes} bytes of shared memory and {RESERVED_BYTES} are "
            f"reserved, but a block has {SHARED_BYTES}; use fewer stages or a smaller block_k"
        )
