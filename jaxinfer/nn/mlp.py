"""The feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxinfer.nn.linear import Linear
from jaxinfer.nn.tap import NO_TAP, Tap
from pallas_kernels.shapes import Array, Float

_gelu_tanh = partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "relu": jax.nn.relu,
}
"""Names are those of HF's `hidden_act`."""


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))` (GLU variants, arXiv:2002.05202).

    Gate and up are one product with output [2, F]: fewer leaves to dispatch, a wider matmul, and a
    shard of F holds matching halves.
    """

    def __init__(self, hidden: int, intermediate: int, *, activation: str, bias: bool, dtype: Any):
        self.gate_up = Linear(
            hidden, (2, intermediate), dtype=dtype, axes=("embed", None, "mlp"), bias=bias
        )
        self.down = Linear(intermediate, (hidden,), dtype=dtype, axes=("mlp", "embed"), bias=bias)
        self.activation = activation

    def __call__(self, x: Float[Array, "T D"], tap: Tap = NO_TAP) -> Float[Array, "T D"]:
        gate_up = self.gate_up(x)  # [T, 2, F]
        hidden = ACTIVATIONS[self.activation](gate_up[:, 0]) * gate_up[:, 1]
        return self.down(tap("mlp_hidden", hidden))


class PlainMLP(nnx.Module):
    """`down(activation(up(x)))`, as in GPT-2."""

    def __init__(self, hidden: int, intermediate: int, *, activation: str, bias: bool, dtype: Any):
        self.up = Linear(hidden, (intermediate,), dtype=dtype, axes=("embed", "mlp"), bias=bias)
        self.down = Linear(intermediate, (hidden,), dtype=dtype, axes=("mlp", "embed"), bias=bias)
        self.activation = activation

    def __call__(self, x: Float[Array, "T D"], tap: Tap = NO_TAP) -> Float[Array, "T D"]:
        return self.down(tap("mlp_hidden", ACTIVATIONS[self.activation](self.up(x))))
