"""Int8 products on several devices: each quantizes and multiplies the part that it has.

A block of activations that share a scale never crosses devices, so nothing but sums is exchanged.
XLA could divide the plain product too, but cuts blocks across devices and gathers weights.
"""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxinfer.models import Transformer
from jaxinfer.quant import Int8Embedding, Int8Linear, int8_matmul
from jaxinfer.sharding import mesh_axes
from jaxinfer.surgery import modules_of, replace
from pallas_kernels.shapes import Array, Float

type _Axes = tuple[tuple[str, ...] | None, ...]


class DividedInt8Linear(Int8Linear):
    """`Int8Linear` for several devices.

    Args:
        linear: Whose parameters this takes over.
        mesh: The devices.
        axes: Mesh axes over which each axis of the kernel is divided.
    """

    def __init__(self, linear: Int8Linear, mesh: Mesh | AbstractMesh, axes: _Axes):
        self.kernel, self.scale, self.bias = linear.kernel, linear.scale, linear.bias
        self.mesh, self.axes = mesh, axes

    def multiply(self, x: Float[Array, "T in_features"]) -> Float[Array, "T ..."]:
        return _multiply(x, self.kernel[...], self.scale[...], self.mesh, self.axes)


class DividedInt8Embedding(Int8Embedding):
    """`Int8Embedding` for several devices, arguments as of `DividedInt8Linear`."""

    def __init__(self, embedding: Int8Embedding, mesh: Mesh | AbstractMesh, axes: _Axes):
        self.embedding, self.scale = embedding.embedding, embedding.scale
        self.dtype, self.mesh, self.axes = embedding.dtype, mesh, axes

    def attend(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return _multiply(x, self.embedding[...], self.scale[...], self.mesh, self.axes)


def divide_int8(model: Transformer, mesh: Mesh | AbstractMesh) -> None:
    """Let each device of several multiply with its own part of every int8 weight, in place."""
    if mesh.size == 1:
        return
    for path, linear in modules_of(model, Int8Linear):
        replace(model, path, DividedInt8Linear(linear, mesh, _axes(mesh, linear.kernel)))
    for path, table in modules_of(model, Int8Embedding):
        replace(model, path, DividedInt8Embedding(table, mesh, _axes(mesh, table.embedding)))


def _axes(mesh: Mesh | AbstractMesh, parameter: nnx.Variable) -> _Axes:
    names = parameter.get_metadata("axes")
    return tuple(mesh_axes(mesh, a, n) for a, n in zip(names, parameter.shape, strict=True))


def _multiply(
    x: Array, kernel: Array, scale: Array, mesh: Mesh | AbstractMesh, axes: _Axes
) -> Array:
    """Return float32 [T, *out]."""
    *out, inner = axes
    return jax.shard_map(
        partial(_multiply_own, summed_over=inner),
        mesh=mesh,
        in_specs=(PartitionSpec(None, inner), PartitionSpec(*axes), PartitionSpec(*out)),
        out_specs=PartitionSpec(None, *out),
        check_vma=False,
    )(x, kernel, scale)


def _multiply_own(
    x: Array, kernel: Array, scale: Array, *, summed_over: tuple[str, ...] | None
) -> Array:
    """Run on each device, over its part of the weight."""
    *out, K = kernel.shape
    y = int8_matmul(x, kernel.reshape(-1, K), scale.reshape(-1))
    y = lax.psum(y, summed_over) if summed_over else y
    return y.reshape(x.shape[0], *out)
