"""The decoder: embed, L blocks of attention and feed-forward, norm, head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig
from jaxinfer.nn import MLP, Attention, Embedding, Linear, RMSNorm, RopeTable
from jaxinfer.nn.attention import Attend
from jaxinfer.nn.rope import inverse_frequencies
from pallas_kernels.shapes import Array, Float, Int


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, layer: int, config: ModelConfig, dtype: Any):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

        self.input_norm = norm()
        self.attention = Attention(
            layer,
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            sliding_window=config.window_of(layer),
            dtype=dtype,
        )
        self.mlp_norm = norm()
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            bias=config.mlp_bias,
            dtype=dtype,
        )

    def __call__(
        self, x: Float[Array, "T D"], rope: RopeTable, attend: Attend
    ) -> Float[Array, "T D"]:
        with jax.named_scope("attention"):
            x = x + self.attention(self.input_norm(x), rope, attend)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


class LMHead(nnx.Module):
    """Hidden states → float32 logits. A view of a model's own projection, not a copy."""

    def __init__(self, projection: Embedding | Linear):
        self.projection = projection

    def __call__(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        with jax.named_scope("lm_head"):
            if isinstance(self.projection, Embedding):
                return self.projection.attend(hidden)
            return self.projection(hidden, out_dtype=jnp.float32)


class Transformer(nnx.Module):
    """A decoder-only language model as a function of tokens and of where keys and values live.

    Layers are unrolled: a scan over stacked weights would copy each layer's weights out of the
    stack every step.
    """

    def __init__(self, config: ModelConfig, dtype: Any):
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([Block(i, config, dtype) for i in range(config.num_hidden_layers)])
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(
                config.hidden_size, (config.vocab_size,), dtype=dtype, axes=("embed", "vocab")
            )
        )
        self.config = config

    def __call__(
        self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], attend: Attend
    ) -> Float[Array, "T D"]:
        """Return the hidden states that the head turns into logits, one per token.

        Args:
            token_ids: The step's tokens.
            positions: Their positions in their sequences.
            attend: Stores and reads keys and values.
        """
        config = self.config
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        rope = RopeTable.at(positions, inv_freq)
        x = self.embed(token_ids)  # [T, D]
        for i, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x = block(x, rope, attend)
        return self.final_norm(x)

    @property
    def head_path(self) -> str:
        """Path of the submodule that projects to the vocabulary."""
        return "embed" if self.lm_head is None else "lm_head"

    def head(self) -> LMHead:
        """Return the head alone, for a program that needs no other weight."""
        return LMHead(self.embed if self.lm_head is None else self.lm_head)
