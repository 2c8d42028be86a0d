"""Rotary position embedding (arXiv:2104.09864) and its scalings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.shapes import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a model stretches its rotary frequencies. Names are the HF config's.

    Attributes:
        rope_type: "default", "linear", "llama3" or "explicit_factors".
        factor: Stretch of the context ("linear", "llama3").
        low_freq_factor: Wavelengths above `original / low_freq_factor` are stretched ("llama3").
        high_freq_factor: Wavelengths below `original / high_freq_factor` are kept ("llama3").
        original_max_position_embeddings: Context length of the pre-training ("llama3").
        factors: One divisor per frequency, as GGUF stores them ("explicit_factors").
    """

    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()


ROPE_TYPES = ("default", "linear", "llama3", "explicit_factors")


def inverse_frequencies(head_dim: int, rope_theta: float, scaling: RopeScaling) -> np.ndarray:
    """Return float64 [H / 2]: radians per position of each rotated pair."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inv_freq = rope_theta**-exponents
    match scaling.rope_type:
        case "default":
            return inv_freq
        case "linear":
            return inv_freq / scaling.factor
        case "explicit_factors":
            return inv_freq / np.asarray(scaling.factors, np.float64)
        case "llama3":
            return _llama3(inv_freq, scaling)
    raise NotImplementedError(f"rope_type {scaling.rope_type!r} is not one of {ROPE_TYPES}")


def _llama3(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's rule: keep short wavelengths, stretch long ones, blend between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1 keeps, 0 stretches
    return inv_freq * (blend + (1 - blend) / scaling.factor)


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of a step's positions, shared by all layers.

    Attributes:
        cos: float32 [T, 1, H / 2].
        sin: float32 [T, 1, H / 2].
    """

    cos: Array
    sin: Array

    @classmethod
    def at(cls, positions: Int[Array, " T"], inv_freq: np.ndarray) -> RopeTable:
        """Phases are float32: bfloat16 rounds position 257 to 256, and is useless beyond that."""
        frequencies = jnp.asarray(inv_freq, jnp.float32)[None, :]
        phases = positions.astype(jnp.float32)[:, None] * frequencies  # [T, H / 2]
        return cls(jnp.cos(phases)[:, None, :], jnp.sin(phases)[:, None, :])


def apply_rope(x: Float[Array, "T N H"], table: RopeTable) -> Float[Array, "T N H"]:
    """Rotate each pair (x[i], x[i + H / 2]), HF's layout, by its phase; in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (
        first * table.cos - second * table.sin,
        second * table.cos + first * table.sin,
    )
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
