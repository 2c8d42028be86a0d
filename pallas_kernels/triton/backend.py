"""Every use of Pallas' Triton lowering that the portable kernels make, and no other.

JAX has deprecated that lowering; when it goes, this file says what has to be replaced. Kernels
here are also run by Pallas' interpreter (`interpret=True`), where `dot` is plain jnp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.capability import most_elements
from pallas_kernels.shapes import Array


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    input_output_aliases: dict[int, int] | None = None,
    interpret: bool = False,
) -> Callable[..., Any]:
    """Return a function of arrays that runs `kernel` once for each point of `grid`.

    The kernel is given whole arrays in device memory, and loads what it needs of them. Arrays that
    are None are None in the kernel.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=input_output_aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )


def load(ref: Any, index: tuple[Any, ...], *, mask: Array | None = None) -> Array:
    """Load `ref[index]`; where `mask` is false, nothing is read and the result is zero."""
    view = ref.at[index]
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return plgpu.load(view, mask=mask, other=other)


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


def exp2(x: Array, *, interpret: bool = False) -> Array:
    """Return 2 ** x for float32 as the hardware has it.

    Results too small for a normal number are 0; the library's function spends four more
    instructions to have them.
    """
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32", x)


def reciprocal(x: Array, *, interpret: bool = False) -> Array:
    """Return 1 / x for float32 as the hardware has it, off by one unit in the last place.

    A division calls a subroutine, and the registers that are in use then have to be saved: some
    chips spill. For arrays only; a scalar has to be broadcast.
    """
    return 1 / x if interpret else _instruction("rcp.approx.ftz.f32", x)


def _instruction(name: str, x: Array) -> Array:
    [result] = plgpu.elementwise_inline_asm(
        f"{name} $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def check_offsets(*arrays: Array) -> None:
    """Refuse arrays that the lowering would address wrongly; see `most_elements`.

    Raises:
        NotImplementedError: Says which array.
    """
    for array in arrays:
        if most_elements(array.size, array.dtype) < array.size:
            raise NotImplementedError(
                f"an array {array.dtype.name}{list(array.shape)} of 2 to 4 GiB cannot be addressed "
                "by the portable GPU kernels; take fewer pages, or more than 4 GiB of them a layer"
            )
