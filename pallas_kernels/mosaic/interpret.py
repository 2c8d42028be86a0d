"""What JAX's interpreter of Mosaic GPU kernels cannot do yet, said in operations that it can.

The interpreter of jax 0.11.2 and 0.12.0.1 has no rule for a wgmma whose left operand is in
registers, nor for an accumulator that starts from a value. Interpreted kernels do that one product
in jnp. All else, barriers, TMA and the wgmma of queries and keys, runs as it is written.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shapes import Array


def accumulate(acc: Array, weights: Array, values: Any, *, interpret: Any) -> Array:
    """Return acc + weights @ values.

    Args:
        acc: float32 [M, H] in registers.
        weights: [M, block_k] in registers, in the dtype of `values`.
        values: Reference to [block_k, H] in shared memory.
        interpret: What the kernel was built with.
    """
    if interpret:
        block = values[...].astype(jnp.float32)
        # A wgmma reads through the same proxy as TMA writes. This plain read does not, and the
        # race detector asks for a fence before the next copy into the slot.
        plgpu.commit_smem()
        product = jnp.dot(weights.astype(jnp.float32), block, precision=lax.Precision.HIGHEST)
        return acc + product

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, weights, values)

    product: Any = pl.run_state(multiply)(plgpu.ACC.init(acc))
    return product
