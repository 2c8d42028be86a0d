"""The running softmax of a tile of scores in a warpgroup's registers.

Knows scores and their layout; knows no pages and no barriers. FlashAttention's recurrence
(arXiv:2205.14135, algorithm 1) to base 2, the exponential that the hardware has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shapes import Array

LOG2E = math.log2(math.e)

MASKED = -(2.0**100)
"""Score of what is not seen. Finite, so that the difference of two of them is no NaN; whatever a
row sums up before it has seen its first key, the first real score multiplies by 0. A power of two,
so that it times a scale is exact: -1e30 * 0.18 fused with the subtraction of its rounded self left
1e22, whose exponential is infinite."""

ROWS = 64
"""Rows of the tile that one warpgroup multiplies."""

TILE = plgpu.Layout.WGMMA
"""How a warpgroup's registers hold a tile of `ROWS` rows."""


class Running(NamedTuple):
    """Softmax so far.

    Attributes:
        acc: float32 [ROWS, H], weighted values, not yet divided by `row_sum`.
        row_max: float32 [ROWS], largest score, times log2(e).
        row_sum: float32 [ROWS], sum of weights.
    """

    acc: Array
    row_max: Array
    row_sum: Array


@dataclass(frozen=True)
class ScoreRule:
    """How products of queries and keys become scores.

    Attributes:
        scale: Multiplies them; positive.
        softcap: Scores become `softcap * tanh(score / softcap)`; None leaves them.
    """

    scale: float
    softcap: float | None

    @property
    def log2_scale(self) -> float:
        """What is left to multiply `capped` products with to have scores to base 2."""
        return LOG2E * (self.scale if self.softcap is None else 1.0)

    def capped(self, products: Array) -> Array:
        """Apply the cap. tanh by exponentials: the hardware's tanh has 11 bits, times the cap."""
        if self.softcap is None:
            return products
        grown = jnp.exp2(products * (2.0 * LOG2E * self.scale / self.softcap))
        # Its square is the reciprocal of 1 + grown; a division would take four instructions.
        root = lax.rsqrt(1.0 + grown)
        return self.softcap - (2.0 * self.softcap) * root * root


def start(head_dim: int) -> Running:
    """Return the softmax of no keys."""
    full = lambda value: plgpu.layout_cast(  # noqa: E731
        jnp.full((ROWS,), value, jnp.float32), TILE.reduce(1)
    )
    acc = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), TILE)
    return Running(acc, full(MASKED), full(0.0))


def see(state: Running, scores: Array, log2_scale: float) -> tuple[Running, Array]:
    """Take in a block of scores.

    Args:
        state: Before.
        scores: float32 [ROWS, block_k], `MASKED` where a key is not seen.
        log2_scale: Multiplies the scores.

    Returns:
        The state after, except that `acc` lacks the block's values yet, and the weights that they
        are to be multiplied with, float32 [ROWS, block_k].
    """
    row_max = jnp.maximum(state.row_max, scores.max(axis=1) * log2_scale)
    rescale = jnp.exp2(state.row_max - row_max)
    weights = jnp.exp2(scores * log2_scale - lax.broadcast_in_dim(row_max, scores.shape, [0]))
    acc = state.acc * lax.broadcast_in_dim(rescale, state.acc.shape, [0])
    return Running(acc, row_max, state.row_sum * rescale + weights.sum(axis=1)), weights


def finish(state: Running, sinks: Array | None) -> Array:
    """Return the weighted mean of the values, float32 [ROWS, H]; zeros where nothing was seen.

    Args:
        state: After all keys.
        sinks: float32 [ROWS], scores to base 2 that take part with a value of zero.
    """
    rescale, row_sum = 1.0, state.row_sum
    if sinks is not None:
        row_max = jnp.maximum(state.row_max, sinks)
        rescale = jnp.exp2(state.row_max - row_max)
        row_sum = row_sum * rescale + jnp.exp2(sinks - row_max)
    mean = rescale / jnp.maximum(row_sum, 1e-30)
    return state.acc * lax.broadcast_in_dim(mean, state.acc.shape, [0])


def clear_values_from(values, first: Array, *, head_dim: int, columns: int) -> None:
    """Zero the rows [first, block_k) of a block of values in shared memory.

    Slots behind a sequence's last key may hold anything, NaN included. Their weights are 0, but
    0 * NaN is NaN. Ends with the fence that a wgmma needs to see the zeros.

    Args:
        values: Reference to [block_k, H].
        first: Traced row.
        head_dim: H.
        columns: Columns of the reference's tiles.
    """
    for row in range(0, values.shape[0], ROWS):
        for column in range(0, head_dim, columns):
            part = values.at[row : row + ROWS, column : column + columns]
            block = plgpu.load(part, layout=TILE)
            rows = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=TILE) + row
            part[...] = jnp.where(rows < first, block, jnp.zeros_like(block))
    plgpu.commit_smem()
