"""The decoder: embed, L blocks of attention and feed-forward, norm, head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig
from jaxinfer.nn import (
    Attention,
    Embedding,
    GatedMLP,
    LatentAttention,
    Linear,
    MoE,
    Norm,
    PlainMLP,
    RopeConfig,
    RopeTable,
)
from jaxinfer.nn.attention import Attend
from jaxinfer.nn.tap import NO_TAP, Tap
from pallas_kernels.shapes import Array, Bool, Float, Int

RopeTables = Mapping[RopeConfig | None, RopeTable | None]


class Block(nnx.Module):
    """Attention and feed-forward, each added to the residual stream.

    Plainly, `x += attention(input_norm(x)); x += mlp(mlp_norm(x))`. The config moves the norms, or
    lets both read the same x.
    """

    def __init__(self, layer: int, config: ModelConfig, dtype: Any):
        def norm(exists: bool) -> Norm | None:
            return Norm((config.hidden_size,), config.norm, dtype=dtype) if exists else None

        self.input_norm = norm(config.pre_norm)
        self.attention = _attention(layer, config, dtype)
        self.post_attention_norm = norm(config.post_norm)
        self.mlp_norm = norm(config.pre_norm and not config.shared_norm)
        self.mlp = _feed_forward(layer, config, dtype)
        self.post_mlp_norm = norm(config.post_norm)
        self.rope = config.rope_of(layer)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "T D"],
        ropes: RopeTables,
        attend: Attend,
        is_real: Bool[Array, " T"],
        tap: Tap = NO_TAP,
    ) -> Float[Array, "T D"]:
        config = self.config
        x = tap("resid_pre", x)
        with jax.named_scope("attention"):
            normed = tap("attn_in", _apply(self.input_norm, x))
            attended = self.attention(normed, ropes[self.rope], attend, tap)
            attended = self._scaled(_apply(self.post_attention_norm, attended))
            after = tap("resid_mid", x + tap("attn_out", attended))
        with jax.named_scope("mlp"):
            if not config.shared_norm:
                normed = _apply(self.mlp_norm, x if config.parallel_block else after)
            normed = tap("mlp_in", normed)
            # Padding must not take an expert's time; nothing else cares.
            mlp = self.mlp
            update = mlp(normed, is_real, tap) if isinstance(mlp, MoE) else mlp(normed, tap)
            update = self._scaled(_apply(self.post_mlp_norm, update))
            return tap("resid_post", after + tap("mlp_out", update))

    def _scaled(self, update: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return _times(update, self.config.residual_multiplier)


def _feed_forward(layer: int, config: ModelConfig, dtype: Any) -> GatedMLP | PlainMLP | MoE:
    D, activation = config.hidden_size, config.hidden_act
    if config.moe is not None and config.is_routed(layer):
        return MoE(D, config.moe, activation=activation, dtype=dtype)
    kind = GatedMLP if config.gated_mlp else PlainMLP
    return kind(
        D, config.intermediate_size, activation=activation, bias=config.mlp_bias, dtype=dtype
    )


def _attention(layer: int, config: ModelConfig, dtype: Any) -> Attention | LatentAttention:
    H = config.head_dim
    scale = H**-0.5 if config.attention_scale is None else config.attention_scale
    if config.latent is not None:
        return LatentAttention(
            layer,
            config.hidden_size,
            config.latent,
            num_heads=config.num_attention_heads,
            scale=scale,
            norm=config.norm,
            bias=config.attention_bias,
            dtype=dtype,
        )
    return Attention(
        layer,
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=H,
        scale=scale,
        sliding_window=config.window_of(layer),
        logit_softcap=config.attention_softcap,
        sinks=config.attention_sinks,
        q_norm=_head_norm(config.num_attention_heads, config, dtype),
        k_norm=_head_norm(config.num_key_value_heads, config, dtype),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        dtype=dtype,
    )


def _head_norm(num_heads: int, config: ModelConfig, dtype: Any) -> Norm | None:
    norm = dataclasses.replace(config.norm, bias=False)
    shape, axes = (num_heads, config.head_dim), ("kv_heads", None)
    match config.qk_norm:
        case "shared":
            return Norm((config.head_dim,), norm, dtype=dtype)
        case "per_head":
            return Norm(shape, norm, dtype=dtype, axes=axes)
        case "across_heads":
            return Norm(shape, norm, dtype=dtype, axes=axes, over=2)
    return None


def _apply(module: nnx.Module | None, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x if module is None else module(x)


def _times(x: Array, factor: float) -> Array:
    """Multiply in x's dtype, or not at all."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


class LMHead(nnx.Module):
    """Hidden states → float32 logits. A view of a model's own projection, not a copy."""

    def __init__(self, projection: Embedding | Linear, config: ModelConfig):
        self.projection = projection
        self.multiplier, self.softcap = config.logit_multiplier, config.logit_softcap

    def __call__(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        with jax.named_scope("lm_head"):
            if isinstance(self.projection, Embedding):
                logits = self.projection.attend(hidden)
            else:
                logits = self.projection(hidden, out_dtype=jnp.float32)
            logits = _times(logits, self.multiplier)
            if self.softcap is not None:
                logits = self.softcap * jnp.tanh(logits / self.softcap)
            return logits


class Transformer(nnx.Module):
    """A decoder-only language model as a function of tokens and of where keys and values live.

    Layers are unrolled: a scan over stacked weights would copy each layer's weights out of the
    stack every step.
    """

    def __init__(self, config: ModelConfig, dtype: Any):
        # No effect where the engine has settled a shorter length already.
        config = config.for_length(config.max_position_embeddings)
        V, D = config.vocab_size, config.hidden_size
        self.embed = Embedding(V, D, dtype=dtype)
        self.positions = (
            Embedding(config.max_position_embeddings, D, dtype=dtype)
            if config.learned_positions
            else None
        )
        self.layers = nnx.List([Block(i, config, dtype) for i in range(config.num_hidden_layers)])
        self.final_norm = Norm((D,), config.norm, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(D, (V,), dtype=dtype, axes=("embed", "vocab"))
        )
        self.config = config

    def __call__(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        attend: Attend,
        tap: Tap = NO_TAP,
    ) -> Float[Array, "T D"]:
        """Return the hidden states that the head turns into logits, one per token.

        Args:
            token_ids: The step's tokens.
            positions: Their positions in their sequences; negative for padding.
            attend: Stores and reads keys and values.
            tap: Sees what is computed on the way, and may change it.
        """
        # Most models have one kind of rope, a few two, and layers without.
        kinds = dict.fromkeys(block.rope for block in self.layers)
        ropes = {rope: None if rope is None else RopeTable.at(positions, rope) for rope in kinds}
        x = _times(self.embed(token_ids), self.config.embedding_multiplier)  # [T, D]
        if self.positions is not None:
            x = x + self.positions(positions)
        x = tap("embed", x)
        for i, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x = block(x, ropes, attend, positions >= 0, tap.inside(f"layers.{i}"))
        return tap("final", self.final_norm(x))

    @property
    def head_path(self) -> str:
        """Path of the submodule that projects to the vocabulary."""
        return "embed" if self.lm_head is None else "lm_head"

    def head(self) -> LMHead:
        """Return the head alone, for a program that needs no other weight."""
        return LMHead(self.embed if self.lm_head is None else self.lm_head, self.config)
