"""Linear layers over packed weights: the kernel's call, and the same in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.cpu_kernels.build import load_library
from jaxinfer.cpu_kernels.packing import BLOCK, FORMATS, LANES, TAIL, per_word
from pallas_kernels.shapes import Array, Float, Int

GATES = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2, "gelu_new": 2, "gelu_fast": 2, "gelu": 3}
"""Activations that the kernel applies to gates: HF's name → its number in jobs.h."""


def linear(
    x: Float[Array, "T in_features"],
    weight: Array,
    *,
    fmt: str,
    out_features: int,
    norm: Float[Array, " in_features"] | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Float[Array, "T out_features"] | None = None,
    out_dtype: Any = None,
    isa: str = "auto",
) -> Float[Array, "T out_features"]:
    """Return `residual + gated(rms_norm(x) @ weight.T + bias)`; sums are float32, of int8 exact.

    A row's result is bitwise the same whatever the other rows, their number and the threads.

    Args:
        x: float32 or bfloat16.
        weight: Packed, see `jaxinfer.cpu_kernels.packing`.
        fmt: The weight's format. For "int8" x is made int8 too, each `packing.BLOCK` of a row with
            a scale of its own.
        out_features: Columns of the result; with a gate, half of the weight's outputs.
        norm: Scale of an RMS norm of x, float32; None for no norm.
        eps: Of the norm.
        gate: Outputs come by turns, 16 gates and 16 values: `activation(gates) * values`.
        residual: Added to the result, in its type.
        out_dtype: float32 or bfloat16; x's if None.
        isa: "auto" or one of the library's `isa_names`.

    Raises:
        BuildError: There is no library.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    none = np.zeros(0, np.float32)
    call = jax.ffi.ffi_call(
        "jaxinfer_linear" + load_library().suffix,
        jax.ShapeDtypeStruct((x.shape[0], out_features), dtype),
        vmap_method=None,
    )
    return call(
        x,
        weight,
        none if norm is None else norm,
        none if residual is None else residual.astype(dtype),
        format=np.int32(FORMATS[fmt][0]),
        gate=np.int32(GATES[gate]),
        eps=np.float32(eps),
        isa=isa,
    )


def reference_linear(
    x: Float[Array, "T in_features"],
    weight: Array,
    *,
    fmt: str,
    out_features: int,
    norm: Float[Array, " in_features"] | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Float[Array, "T out_features"] | None = None,
    out_dtype: Any = None,
) -> Float[Array, "T out_features"]:
    """Return what `linear` promises, in plain jnp."""
    values, scales, biases = unpack_words(weight, fmt)  # [N, K'], [N], [N]
    x32 = x.astype(jnp.float32)
    if norm is not None:
        mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        x32 = x32 * lax.rsqrt(mean_square + eps) * norm[None]
    x32 = jnp.pad(x32, ((0, 0), (0, values.shape[1] - x.shape[1])))
    if fmt == "int8":
        y = int8_matmul(x32, values) * scales[None]
    else:
        contract = (((1,), (1,)), ((), ()))
        y = lax.dot_general(
            x32.astype(values.dtype), values, contract, preferred_element_type=jnp.float32
        )
    y = y + biases[None]
    if gate is not None:
        by_turns = y.reshape(y.shape[0], -1, 2, LANES // 2)
        gates, values = (by_turns[:, :, i].reshape(y.shape[0], -1) for i in (0, 1))
        y = _activate(gate, gates) * values
    y = y[:, :out_features]
    dtype = jnp.dtype(out_dtype or x.dtype)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    return y.astype(dtype)


def int8_matmul(x: Float[Array, "T K"], values: Int[Array, "N K"]) -> Float[Array, "T N"]:
    """Return float32 `x @ values.T`, with each `BLOCK` of a row's inputs made int8 on the way.

    A block's largest magnitude becomes 127. Its products are summed exactly.
    """
    T, K = x.shape
    x = x.astype(jnp.float32)
    quantized, scales = quantize_blocks(x)  # [T, blocks, BLOCK], [T, blocks, 1]
    if T > 32:
        # Behind many rows a float32 product is faster: XLA:CPU has no fast one for blocks.
        rounded = (quantized.astype(jnp.float32) * scales).reshape(T, -1)[:, :K]
        return rounded @ values.astype(jnp.float32).T
    blocks = jnp.pad(values, ((0, 0), (0, -K % BLOCK))).reshape(values.shape[0], -1, BLOCK)
    batch = (((2,), (2,)), ((1,), (1,)))
    # Fewer than 4 rows of int8 are multiplied 15 to 30 times slower.
    quantized = jnp.pad(quantized, ((0, max(0, 4 - T)), (0, 0), (0, 0)))
    sums = lax.dot_general(quantized, blocks, batch, preferred_element_type=jnp.int32)
    return jnp.einsum("GTN,TG->TN", sums[:, :T].astype(jnp.float32), scales[..., 0])


def quantize_blocks(x: Float[Array, "T K"]) -> tuple[Array, Array]:
    """Return int8 [T, blocks, BLOCK] and float32 scales [T, blocks, 1].

    A block that is not finite gets the scale NaN.
    """
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(x.shape[0], -1, BLOCK)
    peak = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    inverse = jnp.where(peak > 0, 127.0 / peak, 0.0)
    quantized = jnp.round(jnp.where(jnp.isfinite(x), x, 0.0) * inverse).astype(jnp.int8)
    return quantized, jnp.where(jnp.isfinite(peak), peak / 127.0, jnp.nan)


def embed(
    weight: Array, token_ids: Int[Array, " T"], *, fmt: str, in_features: int, dtype: Any
) -> Float[Array, "T in_features"]:
    """Return rows of a packed weight."""
    groups = weight.shape[1] - TAIL
    panels, lanes = token_ids // LANES, token_ids % LANES
    words = weight.at[panels, :, lanes].get(mode="clip")  # [T, groups + TAIL]
    values = _values(words[:, :groups], fmt)
    values = values.reshape(token_ids.shape[0], -1)[:, :in_features]
    if fmt != "int8":
        return values.astype(dtype)
    scales = lax.bitcast_convert_type(words[:, groups], jnp.float32)
    return (values.astype(jnp.float32) * scales[:, None]).astype(dtype)


def unpack_words(weight: Array, fmt: str) -> tuple[Array, Array, Array]:
    """Return values [N, K] in the format's type, float32 scales [N] and biases [N], all padded."""
    panels, lines, _ = weight.shape
    groups = lines - TAIL
    words = jnp.moveaxis(weight[:, :groups], 2, 1).reshape(panels * LANES, groups)
    values = _values(words, fmt)
    tail = lax.bitcast_convert_type(weight[:, groups:], jnp.float32)
    values = values.reshape(panels * LANES, groups * per_word(fmt))
    return values, tail[:, 0].reshape(-1), tail[:, 1].reshape(-1)


def _values(words: Array, fmt: str) -> Array:
    """Take words apart, on a new last axis unless there is one number in each."""
    values = lax.bitcast_convert_type(words, FORMATS[fmt][1])
    return values ^ jnp.int8(-128) if fmt == "int8" else values


def _activate(gate: str, x: Array) -> Array:
    if gate == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=gate != "gelu")
