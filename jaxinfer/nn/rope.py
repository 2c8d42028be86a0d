"""Rotary position embedding (arXiv:2104.09864): phases of a step's positions, and the rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.nn.rope_scaling import RopeConfig
from pallas_kernels.shapes import Array, Float, Int


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of a step's positions, shared by all layers with the same `RopeConfig`.

    Attributes:
        cos: float32 [T, 1, rotary_dim / 2].
        sin: float32 [T, 1, rotary_dim / 2].
        interleaved: Which dimensions make a pair, see `RopeConfig`.
    """

    cos: Array
    sin: Array
    interleaved: bool = False

    @classmethod
    def at(cls, positions: Int[Array, " T"], rope: RopeConfig) -> RopeTable:
        """Return the table of these positions."""
        phases = phases_at(positions, rope.inverse_frequencies())[:, None, :]
        factor = rope.attention_factor
        return cls(jnp.cos(phases) * factor, jnp.sin(phases) * factor, rope.interleaved)


def phases_at(positions: Int[Array, " T"], inv_freq: np.ndarray) -> Float[Array, "T F"]:
    """Return float32 `positions * inv_freq`, less whole turns: within about pi of 0.

    A float32 product is off by 0.008 rad at position 131,072, for want of mantissa. Here a turn is
    2**32 units, and a uint32 product drops whole turns by overflowing, exactly. What the rounding
    of the frequencies to units left over, a product of small numbers, is added in float32.
    """
    turns = inv_freq / (2 * math.pi)
    units = np.round(turns * 2.0**32)
    rest = (turns - units * 2.0**-32).astype(np.float32)
    unsigned = jnp.asarray((units % 2.0**32).astype(np.uint32))
    wrapped = positions.astype(jnp.uint32)[:, None] * unsigned[None, :]
    fraction = lax.bitcast_convert_type(wrapped, jnp.int32).astype(jnp.float32) * 2.0**-32
    fraction += positions.astype(jnp.float32)[:, None] * jnp.asarray(rest)[None, :]
    return fraction * (2 * math.pi)


def apply_rope(x: Float[Array, "T N H"], table: RopeTable) -> Float[Array, "T N H"]:
    """Rotate each pair of the first `rotary_dim` dimensions by its phase, in float32."""
    rotary_dim = 2 * table.cos.shape[-1]
    x32 = x[..., :rotary_dim].astype(jnp.float32)
    if table.interleaved:
        first, second = x32[..., 0::2], x32[..., 1::2]
    else:
        first, second = jnp.split(x32, 2, axis=-1)
    rotated = (
        first * table.cos - second * table.sin,
        second * table.cos + first * table.sin,
    )
    if table.interleaved:
        turned = jnp.stack(rotated, axis=-1).reshape(x32.shape)
    else:
        turned = jnp.concatenate(rotated, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rotary_dim:]], axis=-1)
