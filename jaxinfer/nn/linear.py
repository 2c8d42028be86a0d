"""The weight seam: a module that knows how to multiply.

Quantization and LoRA replace a `Linear` by another module with the same call (`quant.py`, `lora.py`
later); nothing else in the model knows.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.nn.parameter import parameter
from pallas_kernels.shapes import Array, Float


class Linear(nnx.Module):
    """`x @ kernel + bias`, products accumulated in float32.

    Attributes:
        kernel: [in, *out]. Input-major, because that is the layout in which XLA:CPU multiplies thin
            float32 batches at memory speed. Several output axes keep apart what is sharded apart.
        bias: [*out] or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: tuple[int, ...],
        *,
        dtype: Any,
        axes: tuple[str | None, ...],
        bias: bool = False,
    ):
        self.kernel = parameter((in_features, *out_features), dtype, axes)
        self.bias = parameter(out_features, dtype, axes[1:]) if bias else None

    def __call__(
        self, x: Float[Array, "T in_features"], *, out_dtype: Any = None
    ) -> Float[Array, "T ..."]:
        """Return [T, *out] in x's dtype, or in `out_dtype`."""
        contract = (((1,), (0,)), ((), ()))
        y = lax.dot_general(x, self.kernel[...], contract, preferred_element_type=jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)[None]
        return y.astype(out_dtype or x.dtype)
