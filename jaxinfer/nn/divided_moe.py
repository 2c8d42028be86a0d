"""A mixture whose experts lie on several devices: each computes its part, one sum joins them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxinfer.nn.moe import ExpertKernels, MoE
from pallas_kernels.shapes import Array, Float, Int


class DividedMoE(MoE):
    """`MoE` for several devices, which all see every token.

    A device visits the experts that it has with the share of their width that it has; what it
    lacks adds zeros. XLA could divide the plain layer's products too, but would sum the visits,
    which are `num_experts_per_tok` times as many as tokens, and gather all experts if these are
    divided.

    Args:
        moe: Whose parameters this takes over.
        mesh: The devices.
        expert_axes: Mesh axes over which experts are divided.
        width_axes: Mesh axes over which each expert's F is divided.
    """

    def __init__(
        self,
        moe: MoE,
        mesh: Mesh | AbstractMesh,
        expert_axes: tuple[str, ...],
        width_axes: tuple[str, ...],
    ):
        self.router, self.correction_bias, self.shared = moe.router, moe.correction_bias, moe.shared
        self.gate, self.up, self.down = moe.gate, moe.up, moe.down
        self.gate_bias, self.up_bias, self.down_bias = moe.gate_bias, moe.up_bias, moe.down_bias
        self.config, self.activation, self.steady = moe.config, moe.activation, moe.steady
        self.mesh, self.expert_axes, self.width_axes = mesh, expert_axes, width_axes

    def mix(
        self, x: Float[Array, "T D"], weights: Float[Array, "T k"], experts: Int[Array, "T k"]
    ) -> Float[Array, "T D"]:
        e, f = self.expert_axes or None, self.width_axes or None
        wide, narrow = PartitionSpec(e, None, f), PartitionSpec(e, f, None)
        wide_bias, narrow_bias = PartitionSpec(e, f), PartitionSpec(e, None)
        specs = ExpertKernels(wide, wide, narrow, wide_bias, wide_bias, narrow_bias)
        kernels = self.kernels
        if kernels.gate_bias is None:
            specs = specs._replace(gate_bias=None, up_bias=None, down_bias=None)
        whole = PartitionSpec()
        return jax.shard_map(
            self._mix_own,
            mesh=self.mesh,
            in_specs=(whole, whole, whole, specs),
            out_specs=whole,
            check_vma=False,
        )(x, weights, experts, kernels)

    def _mix_own(self, x: Array, weights: Array, experts: Array, kernels: ExpertKernels) -> Array:
        """Run on each device, over its part of the kernels."""
        T, D = x.shape
        k, own = self.config.num_experts_per_tok, kernels.gate.shape[0]
        first = lax.axis_index(self.expert_axes) * own if self.expert_axes else 0
        if kernels.down_bias is not None and self.width_axes:
            # Once, not on every device that has some of the expert's width.
            is_first = lax.axis_index(self.width_axes) == 0
            down_bias = jnp.where(is_first, kernels.down_bias, jnp.zeros_like(kernels.down_bias))
            kernels = kernels._replace(down_bias=down_bias)
        # Visits to others, padding's among them, stand behind those to the own experts.
        local = experts.reshape(T * k) - first
        local = jnp.where((local >= 0) & (local < own), local, own)
        axes = (*self.expert_axes, *self.width_axes)
        if self.steady:
            out = self.mix_steadily(x, weights, local.reshape(T, k), kernels)
            return lax.psum(out, axes) if axes else out
        order = jnp.argsort(local)
        visits = self.visit(x[order // k], local[order], kernels)
        visits = jnp.where((local[order] < own)[:, None], visits, 0.0)
        back = jnp.zeros_like(order).at[order].set(jnp.arange(T * k, dtype=order.dtype))
        out = jnp.einsum("TkD,Tk->TD", visits[back].reshape(T, k, D), weights)
        return lax.psum(out, axes) if axes else out
