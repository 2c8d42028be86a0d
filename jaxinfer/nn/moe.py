"""Mixture of experts: a router sends each token through a few of many feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.nn.linear import Linear
from jaxinfer.nn.mlp import ACTIVATIONS, GatedMLP
from jaxinfer.nn.parameter import parameter
from jaxinfer.nn.tap import NO_TAP, Tap
from pallas_kernels.shapes import Array, Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of a model. Names are the HF config's, where it has one name.

    Attributes:
        num_experts: E.
        num_experts_per_tok: k, how many a token visits.
        intermediate_size: F, of one expert.
        shared_intermediate_size: Width of the layer that every token visits; 0 for none.
        scoring: Scores are the "softmax" or the "sigmoid" of what the router says.
        correction_bias: A learned bias helps a score to be chosen, and does not weigh.
        num_groups: Experts are in so many groups,
        num_groups_per_tok: of which a token may visit so many: those with the largest
        group_top: sum of this many best scores.
        norm_topk_prob: The weights of the k chosen add up to one.
        routed_scaling_factor: Multiplies the weights.
        router_bias: The router's scores have a bias.
        expert_bias: The experts' projections have biases.
        swiglu_limit: Experts compute GPT-OSS's clamped SwiGLU, with this bound.
        stored_as: "matrices" or "mxfp4": how the checkpoint has the experts.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    scoring: str = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    num_groups_per_tok: int = 1
    group_top: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    router_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: float | None = None
    stored_as: str = "matrices"


class ExpertKernels(NamedTuple):
    """Weights of some experts, or something about each of them. Biases may be None."""

    gate: Any  # [E, D, F]
    up: Any  # [E, D, F]
    down: Any  # [E, F, D]
    gate_bias: Any  # [E, F]
    up_bias: Any  # [E, F]
    down_bias: Any  # [E, D]


class MoE(nnx.Module):
    """`sum(weight * expert(x) for the k experts with the highest scores)` (arXiv:2401.04088).

    Each visit of a token to an expert is one row; rows are sorted by expert, and all experts are
    one grouped product. No expert has a capacity, so no token is ever dropped. Padding visits none.

    Attributes:
        steady: What a token gets does not depend, bit by bit, on where the others go: see
            `mix_steadily`. Off at first, since it costs E / k times the products.
    """

    def __init__(self, hidden: int, config: MoEConfig, *, activation: str, dtype: Any):
        E, F = config.num_experts, config.intermediate_size
        self.router = Linear(
            hidden, (E,), dtype=dtype, axes=("embed", None), bias=config.router_bias
        )
        # Gate and up apart: as one product, a shard of it would not hold matching halves.
        wide = ("experts", "embed", "expert_mlp")
        narrow = ("experts", "expert_mlp", "embed")
        self.gate = parameter((E, hidden, F), dtype, wide)
        self.up = parameter((E, hidden, F), dtype, wide)
        self.down = parameter((E, F, hidden), dtype, narrow)
        bias = config.expert_bias
        wide, narrow = ("experts", "expert_mlp"), ("experts", "embed")
        self.gate_bias = parameter((E, F), dtype, wide) if bias else None
        self.up_bias = parameter((E, F), dtype, wide) if bias else None
        self.down_bias = parameter((E, hidden), dtype, narrow) if bias else None
        # float32 whatever the model is: it decides between scores that are close.
        self.correction_bias = (
            parameter((E,), jnp.float32, (None,)) if config.correction_bias else None
        )
        shared = config.shared_intermediate_size
        self.shared = (
            GatedMLP(hidden, shared, activation=activation, bias=False, dtype=dtype)
            if shared
            else None
        )
        self.config, self.activation, self.steady = config, activation, False

    def __call__(
        self, x: Float[Array, "T D"], is_real: Bool[Array, " T"], tap: Tap = NO_TAP
    ) -> Float[Array, "T D"]:
        """Return what the experts make of each token, zeros for those that are not real."""
        correction = None if self.correction_bias is None else self.correction_bias[...]
        scores = tap("router_logits", self.router(x, out_dtype=jnp.float32))
        weights, experts = route(scores, correction, self.config)
        # Padding goes to an expert behind the last, where no group reaches.
        experts = jnp.where(is_real[:, None], experts, self.config.num_experts)
        out = self.mix(x, weights, experts)
        out = jnp.where(is_real[:, None], out, 0.0).astype(x.dtype)
        return out if self.shared is None else out + self.shared(x, tap)

    def mix(
        self, x: Float[Array, "T D"], weights: Float[Array, "T k"], experts: Int[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """Return float32: the weighted sum of what its experts make of each token."""
        if self.steady:
            return self.mix_steadily(x, weights, experts, self.kernels)
        T, D = x.shape
        k = self.config.num_experts_per_tok
        experts = experts.reshape(T * k)
        order = jnp.argsort(experts)  # [T * k] visits by expert
        visits = self.visit(x[order // k], experts[order], self.kernels)
        # Back in the order of tokens: each row knows where its visit went.
        back = jnp.zeros_like(order).at[order].set(jnp.arange(T * k, dtype=order.dtype))
        return jnp.einsum("TkD,Tk->TD", visits[back].reshape(T, k, D), weights)

    def mix_steadily(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T k"],
        experts: Int[Array, "T k"],
        kernels: ExpertKernels,
    ) -> Float[Array, "T D"]:
        """Return what `mix` does, of `kernels`, in an order that no other token has a say in.

        In a grouped product, how a row is summed may depend on the size of its group (XLA:CPU's, of
        jax 0.12, does not: 0 of 20,000 values differed in bfloat16 and float32). Here every expert
        multiplies all T tokens, one expert after the other, and a token adds up those that it
        visits in the order of their ids: for a fixed T, nothing else decides its bits.
        """

        def project(x: Array, kernel: Array, bias: Array | None) -> Array:
            out = jnp.einsum("TD,DF->TF", x, kernel, preferred_element_type=jnp.float32)
            return out if bias is None else out + bias[None].astype(jnp.float32)

        def add(total: Array, one: tuple[Array, ExpertKernels]) -> tuple[Array, None]:
            expert, own = one
            gate, up = project(x, own.gate, own.gate_bias), project(x, own.up, own.up_bias)
            out = project(self._activate(gate, up).astype(x.dtype), own.down, own.down_bias)
            chosen = experts == expert  # [T, k], at most once in a row
            weight = jnp.where(chosen, weights, 0.0).sum(-1, keepdims=True)
            return total + jnp.where(chosen.any(-1, keepdims=True), weight * out, 0.0), None

        ids = jnp.arange(kernels.gate.shape[0], dtype=experts.dtype)
        total, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), (ids, kernels))
        return total

    @property
    def kernels(self) -> ExpertKernels:
        """The experts' weights."""
        names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        parameters = (getattr(self, name) for name in names)
        return ExpertKernels(*(None if p is None else p[...] for p in parameters))

    def visit(
        self, x: Float[Array, "rows D"], experts: Int[Array, " rows"], kernels: ExpertKernels
    ) -> Float[Array, "rows D"]:
        """Return float32; row i visits expert `experts[i]` of `kernels`, which is sorted.

        Rows of an expert behind the last come back as anything.
        """
        E = kernels.gate.shape[0]
        sizes = jnp.bincount(experts, length=E + 1)[:E].astype(jnp.int32)

        def project(x: Array, kernel: Array, bias: Array | None) -> Array:
            out = grouped_matmul(x, kernel, sizes)
            if bias is None:
                return out
            return out + bias.at[experts].get(mode="clip").astype(jnp.float32)

        gate = project(x, kernels.gate, kernels.gate_bias)
        up = project(x, kernels.up, kernels.up_bias)
        return project(self._activate(gate, up).astype(x.dtype), kernels.down, kernels.down_bias)

    def _activate(self, gate: Float[Array, "rows F"], up: Float[Array, "rows F"]) -> Array:
        limit = self.config.swiglu_limit
        if limit is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -limit, limit) + 1)


def route(
    logits: Float[Array, "T E"], correction: Float[Array, " E"] | None, config: MoEConfig
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """Return weights and ids of each token's experts, from what the router says in float32."""
    sigmoid = config.scoring == "sigmoid"
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    choice = scores if correction is None else scores + correction[None, :]
    if config.num_groups > 1:
        choice = jnp.where(_in_best_groups(choice, config), choice, -jnp.inf)
    _, experts = lax.top_k(choice, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling_factor, experts


def _in_best_groups(choice: Float[Array, "T E"], config: MoEConfig) -> Bool[Array, "T E"]:
    """Which experts a token may choose: those of its best groups (arXiv:2405.04434, 2.2.2)."""
    T, E = choice.shape
    groups = choice.reshape(T, config.num_groups, -1)
    quality = lax.top_k(groups, config.group_top)[0].sum(-1)  # [T, num_groups]
    _, best = lax.top_k(quality, config.num_groups_per_tok)
    allowed = (best[:, :, None] == jnp.arange(config.num_groups)[None, None, :]).any(1)
    return jnp.repeat(allowed, E // config.num_groups, axis=1)


def grouped_matmul(
    x: Float[Array, "rows D"], kernels: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "rows F"]:
    """Return float32: the first `sizes[0]` rows times `kernels[0]`, and so on.

    Rows behind the last group hold anything.
    """
    return lax.ragged_dot(x, kernels, sizes, preferred_element_type=jnp.float32)
