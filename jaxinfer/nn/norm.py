"""Normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.nn.parameter import parameter
from pallas_kernels.shapes import Array, Float


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Which normalisation a model uses.

    Attributes:
        eps: Added to the variance.
        center: Subtract the mean: LayerNorm (arXiv:1607.06450). Else RMSNorm (arXiv:1910.07467).
        bias: Add a learned bias at the end.
        offset: Added to the learned scale (Gemma stores scales around 0).
        scale_in_float32: Round to the activation type after scaling, instead of before as Llama
            does. The same in float32; in bfloat16, equal to each family's reference.
    """

    eps: float = 1e-6
    center: bool = False
    bias: bool = False
    offset: float = 0.0
    scale_in_float32: bool = False

    def __post_init__(self) -> None:
        if (self.offset or self.bias) and not self.scale_in_float32:
            raise ValueError(f"{self.offset=} and {self.bias=} need scale_in_float32")


class Norm(nnx.Module):
    """`x / sqrt(mean(x**2) + eps) * (offset + scale) + bias`, of `x - mean(x)` if centered.

    Statistics are float32, over the last axes.

    Args:
        shape: Of the scale: the last axes of the input.
        config: Which normalisation.
        dtype: Of the scale and bias.
        axes: Logical names of the scale's axes.
        over: How many of the last axes share their statistics.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        config: NormConfig,
        *,
        dtype: Any,
        axes: tuple[str | None, ...] = (None,),
        over: int = 1,
    ):
        self.scale = parameter(shape, dtype, axes)
        self.bias = parameter(shape, dtype, axes) if config.bias else None
        self.config = config
        self.over = over

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        config = self.config
        reduced = tuple(range(-self.over, 0))
        x32 = x.astype(jnp.float32)
        if config.center:
            x32 -= jnp.mean(x32, axis=reduced, keepdims=True)
        variance = jnp.mean(x32 * x32, axis=reduced, keepdims=True)
        normed = x32 * lax.rsqrt(variance + config.eps)
        scale = self.scale[...][(None,) * (x.ndim - self.scale.ndim)]
        if not config.scale_in_float32:
            return normed.astype(x.dtype) * scale
        scaled = normed * (scale.astype(jnp.float32) + config.offset)
        if self.bias is not None:
            bias = self.bias[...][(None,) * (x.ndim - self.bias.ndim)]
            scaled += bias.astype(jnp.float32)
        return scaled.astype(x.dtype)
