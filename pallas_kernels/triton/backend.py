"""Every use of Pallas' Triton lowering that the portable kernels make, and no other.

JAX has deprecated that lowering; when it goes, this file says what has to be replaced. Kernels
here are also run by Pallas' interpreter (`interpret=True`), where `dot` is plain jnp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.shapes import Array

ANYWHERE = pl.BlockSpec()
"""A whole array, left in device memory; the kernel loads what it needs of it."""


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    in_specs: Sequence[Any] | None = None,
    out_specs: Any = None,
    input_output_aliases: dict[int, int] | None = None,
    interpret: bool = False,
) -> Callable[..., Any]:
    """Return a function of arrays that runs `kernel` once for each point of `grid`."""
    specs = {} if in_specs is None else {"in_specs": in_specs}
    if out_specs is not None:
        specs["out_specs"] = out_specs
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=input_output_aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
        **specs,
    )


def load(ref: Any, index: Any = (), *, mask: Array | None = None, other: Any = 0) -> Array:
    """Load `ref[index]`; where `mask` is false, nothing is read and `other` is returned."""
    view = ref.at[index] if index != () else ref
    return plgpu.load(view, mask=mask, other=None if mask is None else other)


def store(ref: Any, index: Any, value: Array, *, mask: Array | None = None) -> None:
    """Store `value` at `ref[index]` where `mask` is true."""
    plgpu.store(ref.at[index], value, mask=mask)


def dot(a: Array, b: Array, *, trans_b: bool = False, interpret: bool = False) -> Array:
    """Return float32 a @ b, or a @ b.T.

    float32 operands keep their precision: three tensor-core passes of 10 bits each (TF32x3), which
    no CPU offers, so the interpreter multiplies in float32.
    """
    precision: Any = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if trans_b else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
