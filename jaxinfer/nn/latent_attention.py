"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxinfer.nn.attention import Attend, observe_weights
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.norm import Norm, NormConfig
from jaxinfer.nn.parameter import parameter
from jaxinfer.nn.rope import RopeTable, apply_rope
from jaxinfer.nn.tap import NO_TAP, Tap
from pallas_kernels.shapes import Array, Float


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention. Names are the HF config's.

    Attributes:
        q_lora_rank: Queries are made from a vector of this size; None: from the stream.
        kv_lora_rank: R, the size of the latent that keys and values are made from.
        qk_nope_head_dim: Dimensions of a head's query and key without positions.
        qk_rope_head_dim: Dimensions with positions, which all heads' keys share.
        v_head_dim: Dimensions of a head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def cached_dim(self) -> int:
        """What is cached of a token: its latent, and its rotated part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentAttention(nnx.Module):
    """Attention to latents: of a token only `cached_dim` numbers are kept, for all heads together.

    A head's key is a product with the latent, and so is its value. Instead of making them for every
    token seen, the products are moved to the other side: with `key = latent @ A` and
    `value = latent @ B`,

        scores = q @ key.T     = (q @ A.T) @ latent.T
        out    = probs @ value = (probs @ latent) @ B

    That is plain attention with one KV head, whose values are the first R numbers of its keys.

    Args:
        layer: Index, for the cache.
        hidden: D.
        config: The sizes.
        num_heads: N.
        scale: Multiplies the scores.
        norm: Of the latents.
        bias: Biases of the projections from and to the stream.
        dtype: Of the weights.
    """

    def __init__(
        self,
        layer: int,
        hidden: int,
        config: LatentConfig,
        *,
        num_heads: int,
        scale: float,
        norm: NormConfig,
        bias: bool,
        dtype: Any,
    ):
        self.layer, self.num_heads, self.scale, self.config = layer, num_heads, scale, config
        # The reference gives these two norms no epsilon of the config.
        norm = dataclasses.replace(norm, eps=1e-6)
        R, rank = config.kv_lora_rank, config.q_lora_rank
        down = rank is not None
        self.query_down = (
            Linear(hidden, (rank,), dtype=dtype, axes=("embed", None), bias=bias) if down else None
        )
        self.query_norm = Norm((rank,), norm, dtype=dtype) if down else None
        query_dims = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.query = Linear(
            rank if down else hidden,
            (num_heads, query_dims),
            dtype=dtype,
            axes=("embed", "heads", None),
        )
        self.latent = Linear(
            hidden, (config.cached_dim,), dtype=dtype, axes=("embed", None), bias=bias
        )
        self.latent_norm = Norm((R,), norm, dtype=dtype)
        heads = ("heads", None, None)
        self.key_up = parameter((num_heads, config.qk_nope_head_dim, R), dtype, heads)
        self.value_up = parameter((num_heads, config.v_head_dim, R), dtype, heads)
        self.output = Linear(
            num_heads * config.v_head_dim,
            (hidden,),
            dtype=dtype,
            axes=("heads", "embed"),
            bias=bias,
        )

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: RopeTable | None,
        attend: Attend,
        tap: Tap = NO_TAP,
    ) -> Float[Array, "T D"]:
        assert rope is not None, "latent attention has no other positions"
        T, _ = x.shape
        R, nope = self.config.kv_lora_rank, self.config.qk_nope_head_dim
        compressed = x
        if self.query_down is not None and self.query_norm is not None:
            compressed = self.query_norm(self.query_down(x))
        q = self.query(compressed)  # [T, N, nope + rope]
        # No float32 result is asked for: XLA:CPU has no batched bfloat16 product that gives one.
        q_latent = jnp.einsum("TNp,NpR->TNR", q[..., :nope], self.key_up[...])
        q = jnp.concatenate([q_latent, apply_rope(q[..., nope:], rope)], axis=-1)

        latent = self.latent(x)  # [T, R + rope]
        rotated = apply_rope(latent[:, None, R:], rope)
        k = jnp.concatenate([self.latent_norm(latent[:, None, :R]), rotated], axis=-1)

        q, k = tap("q", q), tap("k", k)
        seen = attend(self.layer, q, k, None, scale=self.scale, sliding_window=None)
        observe_weights(tap, attend, self.layer, q, scale=self.scale, sliding_window=None)
        out = jnp.einsum("TNR,NvR->TNv", seen[..., :R], self.value_up[...])
        out = tap("attn_heads", out)
        return self.output(out.reshape(T, -1))
