"""Normalisation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.nn.parameter import parameter
from pallas_kernels.shapes import Array, Float


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x**2) + eps) * scale` (arXiv:1910.07467), computed in float32."""

    def __init__(self, features: int, *, eps: float, dtype: Any):
        self.scale = parameter((features,), dtype, (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        normed = (x32 * lax.rsqrt(variance + self.eps)).astype(x.dtype)
        # Llama rounds to the activation type before it scales; so do we, for equal bfloat16.
        return normed * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
