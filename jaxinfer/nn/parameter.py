"""How a layer declares a weight: its shape, its type, and the logical name of each axis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx


def parameter(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> nnx.Param:
    """Return a zero parameter whose axes carry logical names for `jaxinfer.sharding`.

    Models are built under `nnx.eval_shape`, so the zeros are never allocated; the checkpoint's
    values go straight into their shardings.
    """
    if len(shape) != len(axes):
        raise ValueError(f"{shape=} and {axes=} must have the same length")
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)
