"""Layers that run on the CPU kernels: packed weights, and a whole block in five calls.

XLA:CPU spends 2 to 9 microseconds on each small operation between the products, of which a block
has two dozen; a small model's decode step is made of them. So what stands between the products is
done inside the kernels wherever a block is of the common kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxinfer import cpu_kernels
from jaxinfer.kv_cache import PagedAttend
from jaxinfer.models import Recipe, Transformer
from jaxinfer.models.transformer import Block, RopeTables
from jaxinfer.nn import Attention, Embedding, GatedMLP, Linear, MoE, Norm, RopeTable
from jaxinfer.nn.attention import Attend, gather_heads
from jaxinfer.nn.tap import NO_TAP, Tap
from jaxinfer.surgery import (
    abstract_parameter,
    modules_of,
    output_major,
    replace,
    weight_sources,
)
from pallas_kernels.shapes import Array, Bool, Float, Int


class PackedLinear(Linear):
    """`Linear` over a packed weight, which holds the bias too.

    Attributes:
        weight: See `jaxinfer.cpu_kernels.packing`.
        fmt: Of the weight.
        out_features: Axes of the result.
        gate: The activation whose gates are among the outputs; None for a plain product.
    """

    def __init__(
        self, in_features: int, out_features: tuple[int, ...], fmt: str, gate: str | None = None
    ):
        outputs = math.prod(out_features)
        # By turns 16 gates and 16 values.
        rows = outputs if gate is None else 2 * (-(-outputs // 16) * 16)
        shape = cpu_kernels.packed_shape(fmt, rows, in_features)
        self.weight = abstract_parameter(shape, jnp.uint32, (None, None, None))
        self.fmt, self.out_features, self.gate = fmt, out_features, gate

    def __call__(
        self,
        x: Float[Array, "T in_features"],
        *,
        norm: FusedNorm | None = None,
        residual: Float[Array, "T out_features"] | None = None,
        out_dtype: Any = None,
    ) -> Float[Array, "T ..."]:
        """Return [T, *out] in x's dtype, or in `out_dtype`; see `jaxinfer.cpu_kernels.linear`."""
        y = cpu_kernels.linear(
            x,
            self.weight[...],
            fmt=self.fmt,
            out_features=math.prod(self.out_features),
            norm=None if norm is None else norm.scale[...],
            eps=0.0 if norm is None else norm.eps,
            gate=self.gate,
            residual=residual,
            out_dtype=out_dtype,
        )
        return y.reshape(x.shape[0], *self.out_features)


class PackedEmbedding(Embedding):
    """`Embedding` that is also the head: one packed weight serves both."""

    def __init__(self, num_embeddings: int, features: int, dtype: Any, fmt: str):
        shape = cpu_kernels.packed_shape(fmt, num_embeddings, features)
        self.weight = abstract_parameter(shape, jnp.uint32, (None, None, None))
        self.num_embeddings, self.features, self.dtype = num_embeddings, features, dtype
        self.fmt = fmt

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        ids = jnp.clip(token_ids, 0, self.num_embeddings - 1)
        return cpu_kernels.embed(
            self.weight[...], ids, fmt=self.fmt, in_features=self.features, dtype=self.dtype
        )

    def attend(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return cpu_kernels.linear(
            x,
            self.weight[...],
            fmt=self.fmt,
            out_features=self.num_embeddings,
            out_dtype=jnp.float32,
        )


class FusedNorm(nnx.Module):
    """An RMS norm that a kernel computes: its scale, float32, with the offset added."""

    def __init__(self, norm: Norm):
        self.scale = abstract_parameter(norm.scale.shape, jnp.float32, (None,))
        self.eps = norm.config.eps

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """Compute it here, for those who want to see what the kernel keeps to itself."""
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        return (x32 * lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)


class PackedBlock(nnx.Module):
    """A pre-norm block with grouped-query attention and a gated feed-forward, in five calls."""

    def __init__(self, block: Block, fmt: str):
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention) and isinstance(mlp, GatedMLP)
        assert block.input_norm is not None and block.mlp_norm is not None
        hidden, *heads = attention.qkv.kernel.shape
        self.input_norm, self.mlp_norm = FusedNorm(block.input_norm), FusedNorm(block.mlp_norm)
        self.q_norm = None if attention.q_norm is None else FusedNorm(attention.q_norm)
        self.k_norm = None if attention.k_norm is None else FusedNorm(attention.k_norm)
        self.qkv = PackedLinear(hidden, tuple(heads), fmt)
        self.output = PackedLinear(attention.output.kernel.shape[0], (hidden,), fmt)
        _, _, intermediate = mlp.gate_up.kernel.shape
        self.gate_up = PackedLinear(hidden, (intermediate,), fmt, gate=mlp.activation)
        self.down = PackedLinear(intermediate, (hidden,), fmt)
        self.sinks = None
        if attention.sinks is not None:
            self.sinks = abstract_parameter(attention.sinks.shape, jnp.float32, (None,))
        self.layer, self.rope = attention.layer, block.rope
        self.scale, self.sliding_window = attention.scale, attention.sliding_window
        self.logit_softcap = attention.logit_softcap

    def __call__(
        self,
        x: Float[Array, "T D"],
        ropes: RopeTables,
        attend: Attend,
        is_real: Bool[Array, " T"],
        tap: Tap = NO_TAP,
    ) -> Float[Array, "T D"]:
        assert isinstance(attend, PagedAttend), "packed blocks run over the paged cache"
        x = tap("resid_pre", x)
        if tap.wants("attn_in", "q", "k", "v", "attn_weights", "attn_heads", "attn_out"):
            x = x + self._attention_in_parts(x, ropes[self.rope], attend, tap)
        else:
            x = self._attention(x, ropes[self.rope], attend)
        x = tap("resid_mid", x)
        if tap.wants("mlp_in", "mlp_hidden", "mlp_out"):
            hidden = self.gate_up(tap("mlp_in", self.mlp_norm(x)))
            x = x + tap("mlp_out", self.down(tap("mlp_hidden", hidden)))
        else:
            x = self.down(self.gate_up(x, norm=self.mlp_norm), residual=x)
        return tap("resid_post", x)

    def _attention(
        self, x: Float[Array, "T D"], rope: RopeTable | None, attend: PagedAttend
    ) -> Float[Array, "T D"]:
        """Return the stream behind the attention."""
        attended = attend.write_and_attend(
            self.layer,
            self.qkv(x, norm=self.input_norm),  # [T, K, G + 2, H]
            rope,
            q_norm=None if self.q_norm is None else self.q_norm.scale[...],
            k_norm=None if self.k_norm is None else self.k_norm.scale[...],
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
            **self._how(),
        )
        return self.output(attended.reshape(x.shape[0], -1), residual=x)

    def _attention_in_parts(
        self, x: Float[Array, "T D"], rope: RopeTable | None, attend: Attend, tap: Tap
    ) -> Float[Array, "T D"]:
        """Return what is added to the stream, computed step by step for a tap to see."""
        attended = gather_heads(
            self.qkv(tap("attn_in", self.input_norm(x))),
            rope,
            attend,
            tap,
            layer=self.layer,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            **self._how(),
        )
        return tap("attn_out", self.output(attended.reshape(x.shape[0], -1)))

    def _how(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "logit_softcap": self.logit_softcap,
            "sinks": None if self.sinks is None else self.sinks[...],
        }


def pack_layers(model: Transformer, dtype: Any, fmt: str) -> list[Recipe]:
    """Replace, in place, every layer that the CPU kernels can run; return the new weights' recipes.

    Routers and the experts of a mixture stay as they are, and so does an embedding that is not the
    head.
    """
    recipes = []
    for path, block in modules_of(model, Block):
        if _is_common(block):
            replace(model, path, PackedBlock(block, fmt))
            recipes += _block_recipes(path, block, fmt)
    routers = {f"{path}.router" for path, _ in modules_of(model, MoE)}
    for path, linear in modules_of(model, Linear):
        if path in routers:
            continue
        in_features, *out_features = linear.kernel.shape
        replace(model, path, PackedLinear(in_features, tuple(out_features), fmt))
        recipes.append(_linear_recipe(f"{path}.weight", path, linear, fmt))
    if model.lm_head is None:
        V, D = model.embed.embedding.shape
        model.embed = PackedEmbedding(V, D, dtype, fmt)
        make = lambda table: (cpu_kernels.pack(table, fmt),)  # noqa: E731
        recipes.append(Recipe(("embed.weight",), ("embed.embedding",), make))
    return recipes


def _is_common(block: Block) -> bool:
    """Whether a block is what `PackedBlock` computes."""
    config, norm = block.config, block.config.norm
    plain_norms = not (norm.center or norm.bias)
    plain_order = config.pre_norm and not (
        config.post_norm or config.parallel_block or config.shared_norm
    )
    return (
        plain_norms
        and plain_order
        and config.residual_multiplier == 1.0
        and config.qk_norm in (None, "shared")
        and type(block.attention) is Attention
        and type(block.mlp) is GatedMLP
        and block.mlp.activation in cpu_kernels.GATES
    )


def _block_recipes(path: str, block: Block, fmt: str) -> list[Recipe]:
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, Attention) and isinstance(mlp, GatedMLP)
    recipes = [
        _linear_recipe(f"{path}.qkv.weight", f"{path}.attention.qkv", attention.qkv, fmt),
        _linear_recipe(f"{path}.output.weight", f"{path}.attention.output", attention.output, fmt),
        _linear_recipe(f"{path}.down.weight", f"{path}.mlp.down", mlp.down, fmt),
        Recipe(
            (f"{path}.gate_up.weight",),
            weight_sources(f"{path}.mlp.gate_up", mlp.gate_up.bias),
            lambda kernel, bias=None: (_pack_gated(kernel, bias, fmt),),
        ),
    ]
    norms = {
        "input_norm": ("input_norm", block.input_norm),
        "mlp_norm": ("mlp_norm", block.mlp_norm),
        "q_norm": ("attention.q_norm", attention.q_norm),
        "k_norm": ("attention.k_norm", attention.k_norm),
    }
    for target, (source, norm) in norms.items():
        if norm is not None:
            offset = np.float32(norm.config.offset)
            recipes.append(
                Recipe(
                    (f"{path}.{target}.scale",),
                    (f"{path}.{source}.scale",),
                    lambda scale, offset=offset: (scale + offset,),
                )
            )
    if attention.sinks is not None:
        recipes.append(
            Recipe((f"{path}.sinks",), (f"{path}.attention.sinks",), lambda sinks: (sinks,))
        )
    return recipes


def _linear_recipe(target: str, path: str, linear: Linear, fmt: str) -> Recipe:
    def make(kernel: np.ndarray, bias: np.ndarray | None = None) -> Sequence[np.ndarray]:
        weight, bias = output_major(kernel, bias)
        return (cpu_kernels.pack(weight, fmt, bias),)

    return Recipe((target,), weight_sources(path, linear.bias), make)


def _pack_gated(kernel: np.ndarray, bias: np.ndarray | None, fmt: str) -> np.ndarray:
    """Pack a kernel [D, 2, F] of gate and up."""
    weight = cpu_kernels.interleave(kernel[:, 0].T, kernel[:, 1].T)
    return cpu_kernels.pack(
        weight, fmt, None if bias is None else cpu_kernels.interleave(bias[0], bias[1])
    )
