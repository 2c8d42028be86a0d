"""Self-attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from flax import nnx

from jaxinfer.nn.linear import Linear
from jaxinfer.nn.norm import Norm
from jaxinfer.nn.parameter import parameter
from jaxinfer.nn.rope import RopeTable, apply_rope
from jaxinfer.nn.tap import NO_TAP, Tap
from pallas_kernels.shapes import Array, Float, Int


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


@runtime_checkable
class AttendWithWeights(Attend, Protocol):
    """An `Attend` that can also say what it gave weight to, for those who look."""

    def weights(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        tokens: Int[Array, " C"] | None,
        num_keys: int | None,
        *,
        scale: float,
        sliding_window: int | None,
        logit_softcap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "C N S"]:
        """Return float32 attention weights of some tokens, to be called after the layer's own call.

        Args:
            layer: Index.
            q: Queries of all tokens.
            tokens: Which of them; None for all.
            num_keys: S, the first keys of the sequence; None for all there can be.
            scale: As for the call, and so the others.
            sliding_window: As for the call.
            logit_softcap: As for the call.
            sinks: As for the call. The weights then add up to less than 1.
        """
        ...


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
        self,
        x: Float[Array, "T D"],
        rope: RopeTable | None,
        attend: Attend,
        tap: Tap = NO_TAP,
    ) -> Float[Array, "T D"]:
        """Return what each token gathers; `rope` is None in layers without positions."""
        T, _ = x.shape
        out = gather_heads(
            self.qkv(x),  # [T, K, G + 2, H]
            rope,
            attend,
            tap,
            layer=self.layer,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_softcap=self.logit_softcap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return self.output(out.reshape(T, self.num_heads * self.head_dim))


def gather_heads(
    qkv: Float[Array, "T K G_plus_2 H"],
    rope: RopeTable | None,
    attend: Attend,
    tap: Tap,
    *,
    layer: int,
    q_norm: Callable[[Array], Array] | None,
    k_norm: Callable[[Array], Array] | None,
    **how: Any,
) -> Float[Array, "T N H"]:
    """Norm and rotate the heads, attend, and show each step.

    Args:
        qkv: Behind the queries of each KV head its key and value.
        rope: The layer's positions; None for none.
        attend: Stores and reads keys and values.
        tap: Sees `q`, `k`, `v`, `attn_weights` and `attn_heads`.
        layer: Index, for the cache.
        q_norm: Of queries [T, N, H], before they are rotated.
        k_norm: Of keys [T, K, H], before they are rotated.
        how: Options of `Attend`.
    """
    T, K, G2, H = qkv.shape
    q = qkv[:, :, :-2].reshape(T, K * (G2 - 2), H)
    k, v = qkv[:, :, -2], qkv[:, :, -1]  # [T, K, H] each
    if q_norm is not None:
        q = q_norm(q)
    if k_norm is not None:
        k = k_norm(k)
    if rope is not None:
        q, k = apply_rope(q, rope), apply_rope(k, rope)
    q, k, v = tap("q", q), tap("k", k), tap("v", v)
    out = attend(layer, q, k, v, **how)
    observe_weights(tap, attend, layer, q, **how)
    return tap("attn_heads", out)


def observe_weights(
    tap: Tap, attend: Attend, layer: int, q: Float[Array, "T N H"], **how: Any
) -> None:
    """Show the weights of an attention that has just been computed, if it can tell them."""
    if isinstance(attend, AttendWithWeights):
        weights = partial(attend.weights, layer, q)
        tap.observe("attn_weights", lambda tokens, keys: weights(tokens, keys, **how))
