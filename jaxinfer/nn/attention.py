"""Self-attention over the paged cache."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from flax import nnx

from jaxinfer.nn.linear import Linear
from jaxinfer.nn.norm import Norm
from jaxinfer.nn.parameter import parameter
from jaxinfer.nn.rope import RopeTable, apply_rope
from pallas_kernels.shapes import Array, Float


@runtime_checkable
class Attend(Protocol):
    """The cache seam: stores a layer's new keys and values, and attends to all of the row's.

    The model is handed one of these; it never sees pages. Serving uses
    `jaxinfer.kv_cache.PagedAttend`. Where `v` is None, the keys are the values too.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"] | None,
        *,
        scale: float,
        sliding_window: int | None,
        logit_softcap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "T N H"]: ...


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245).

    Query, key and value are one product with output [K, G + 2, H]: each KV head stands behind the G
    queries that use it, so a shard of K is whole.

    Args:
        layer: Index, for the cache.
        hidden: D.
        num_heads: N.
        num_kv_heads: K.
        head_dim: H.
        scale: Multiplies the scores.
        sliding_window: Keys visible to a token, itself included; None for all.
        logit_softcap: Scores become `cap * tanh(score / cap)`.
        sinks: Each head has a learned score that takes part in the softmax and adds nothing.
        q_norm: Applied to the queries [T, N, H] before they are rotated.
        k_norm: Applied to the keys [T, K, H] before they are rotated.
        qkv_bias: Biases of the query, key and value projections.
        output_bias: Bias of the output projection.
        dtype: Of the weights.
    """

    def __init__(
        self,
        layer: int,
        hidden: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None,
        logit_softcap: float | None,
        sinks: bool,
        q_norm: Norm | None,
        k_norm: Norm | None,
        qkv_bias: bool,
        output_bias: bool,
        dtype: Any,
    ):
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.sliding_window, self.logit_softcap = scale, sliding_window, logit_softcap
        group = num_heads // num_kv_heads
        self.qkv = Linear(
            hidden,
            (num_kv_heads, group + 2, head_dim),
            dtype=dtype,
            axes=("embed", "kv_heads", None, None),
            bias=qkv_bias,
        )
        self.sinks = parameter((num_heads,), dtype, ("kv_heads",)) if sinks else None
        self.q_norm, self.k_norm = q_norm, k_norm
        self.output = Linear(
            num_heads * head_dim, (hidden,), dtype=dtype, axes=("heads", "embed"), bias=output_bias
        )

    def __call__(
        self, x: Float[Array, "T D"], rope: RopeTable | None, attend: Attend
    ) -> Float[Array, "T D"]:
        """Return what each token gathers; `rope` is None in layers without positions."""
        T, _ = x.shape
        N, H = self.num_heads, self.head_dim
        qkv = self.qkv(x)  # [T, K, G + 2, H]
        q = qkv[:, :, :-2].reshape(T, N, H)
        k, v = qkv[:, :, -2], qkv[:, :, -1]  # [T, K, H] each
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = attend(
            self.layer,
            q,
            k,
            v,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_softcap=self.logit_softcap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return self.output(out.reshape(T, N * H))
