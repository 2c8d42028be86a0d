"""Puts the parts of split decode together, in jnp: XLA makes one small kernel of it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic.softmax import LOG2E, MASKED
from pallas_kernels.shapes import Array, Float

GROUP = 32
"""Splits that are added up one after the other before their sums are. Fixed, and so is the order of
all additions: parts that a row does not reach only add zeros."""


def combine(
    acc: Float[Array, "B S N H"],
    row_max: Float[Array, "B S N"],
    row_sum: Float[Array, "B S N"],
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B N H"]:
    """Return the softmax over all splits: Σ 2^(max_s - max) acc_s / Σ 2^(max_s - max) sum_s.

    Args:
        acc: float32 weighted values; anything where `row_sum` is 0.
        row_max: Largest score of the split, to base 2.
        row_sum: Sum of weights; 0 for a split without keys.
        sinks: Scores that take part with a value of zero.

    Returns:
        float32; zeros for rows without keys.
    """
    _, S, _, _ = acc.shape
    used = row_sum > 0
    most = jnp.max(jnp.where(used, row_max, MASKED), axis=1)
    total = jnp.zeros_like(most)
    if sinks is not None:
        scores = sinks.astype(jnp.float32)[None] * LOG2E
        most = jnp.maximum(most, scores)
        total = jnp.exp2(scores - most)
    weights = jnp.where(used, jnp.exp2(row_max - most[:, None]), 0.0)
    parts = jnp.where(used[..., None], acc, 0.0) * weights[..., None]
    # Products are rounded before they are added. The compiler would fuse some with their addition,
    # and which ones would depend on the number of splits.
    parts, sums = lax.optimization_barrier((parts, row_sum * weights))
    total += _sum_in_order(sums)
    return _sum_in_order(parts) / jnp.where(total > 0, total, 1.0)[..., None]


def _sum_in_order(x: Array) -> Array:
    """Return the sum over axis 1, whose order does not depend on its length."""
    size = x.shape[1]
    if size > GROUP:
        groups = -(-size // GROUP)
        x = jnp.pad(x, ((0, 0), (0, groups * GROUP - size), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(x.shape[0], groups, GROUP, *x.shape[2:])
        x = sum((x[:, :, i] for i in range(1, GROUP)), start=x[:, :, 0])
        size = groups
    return sum((x[:, i] for i in range(1, size)), start=x[:, 0])
