"""Attention to pages: the kernel's calls. `pallas_kernels.xla_attention` is their reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cpu_kernels.build import load_library
from pallas_kernels import RaggedBatch
from pallas_kernels.shapes import Array, Float, Int


# jitted so that a model's layers, which all call it with the same shapes, share one trace.
@partial(jax.jit, static_argnames=("scale", "sliding_window", "logit_softcap", "isa"))
def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "num_pages K page_size H"],
    v_pages: Float[Array, "num_pages K page_size H"],
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    isa: str = "auto",
) -> Float[Array, "T N H"]:
    """Return what `pallas_kernels.paged_attention` promises, from pages read where they are.

    Raises:
        BuildError: There is no library.
    """
    T, N, H = q.shape
    K = k_pages.shape[1]
    (out,) = _call(
        "jaxinfer_attention",
        q.reshape(T, K, N // K, H),
        (k_pages, v_pages),
        batch,
        out=[jax.ShapeDtypeStruct((T, N, H), q.dtype)],
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=sinks,
        isa=isa,
    )
    return out


@partial(
    jax.jit,
    static_argnames=("scale", "sliding_window", "logit_softcap", "interleaved", "eps", "isa"),
)
def write_and_attend(
    qkv: Float[Array, "T K G_plus_2 H"],
    k_pages: Float[Array, "num_pages K page_size H"],
    v_pages: Float[Array, "num_pages K page_size H"],
    batch: RaggedBatch,
    slot_mapping: Int[Array, " T"],
    *,
    cos: Float[Array, "T half"] | None,
    sin: Float[Array, "T half"] | None,
    interleaved: bool = False,
    q_norm: Float[Array, " H"] | None = None,
    k_norm: Float[Array, " H"] | None = None,
    eps: float = 0.0,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    isa: str = "auto",
) -> tuple[Float[Array, "T N H"], Array, Array]:
    """Norm and rotate a layer's heads, store its keys and values, and attend: one call.

    Args:
        qkv: What the projection made: behind the queries of each KV head its key and value.
        k_pages: Keys by page; DONATED where the caller's own donation allows it, else copied.
        v_pages: Values by page; as `k_pages`.
        batch: Which tokens and pages belong together.
        slot_mapping: page * page_size + offset of each token; outside the pool: not stored.
        cos: float32 cosines of the rotary phases; None for a layer without positions.
        sin: The sines.
        interleaved: Pairs of dimensions are neighbours instead of half a head apart.
        q_norm: Scale of an RMS norm of each query, float32; None for no norm.
        k_norm: Of each key.
        eps: Of the norms.
        scale: Multiplies the scores.
        sliding_window: Keys visible to a token, itself included; None for all.
        logit_softcap: Scores become `cap * tanh(score / cap)`.
        sinks: Per head, a score that takes part in the softmax with a value of zero.
        isa: "auto" or one of the library's `isa_names`.

    Returns:
        [T, N, H] in qkv's dtype, and the updated pages.

    Raises:
        BuildError: There is no library.
    """
    T, K, heads, H = qkv.shape
    shapes = [jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in (k_pages, v_pages)]
    out, k_pages, v_pages = _call(
        "jaxinfer_attention_in_place",
        qkv,
        (k_pages, v_pages),
        batch,
        out=[jax.ShapeDtypeStruct((T, K * (heads - 2), H), qkv.dtype), *shapes],
        input_output_aliases={1: 1, 2: 2},
        slots=slot_mapping,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=sinks,
        isa=isa,
    )
    return out, k_pages, v_pages


def _call(
    target: str,
    heads: Array,
    pages: tuple[Array, Array],
    batch: RaggedBatch,
    *,
    out: list[jax.ShapeDtypeStruct],
    input_output_aliases: dict[int, int] | None = None,
    slots: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    interleaved: bool = False,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 0.0,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: Array | None,
    isa: str,
) -> Sequence[Array]:
    def optional(x: Array | None, dtype: Any = jnp.float32) -> Any:
        return np.zeros(0, dtype) if x is None else x.astype(dtype)

    call = jax.ffi.ffi_call(
        target + load_library().suffix,
        out,
        input_output_aliases=input_output_aliases,
        vmap_method=None,
    )
    return call(
        heads,
        *pages,
        *batch,
        optional(sinks),
        optional(slots, jnp.int32),
        optional(cos),
        optional(sin),
        optional(q_norm),
        optional(k_norm),
        scale=np.float32(scale),
        window=np.int32(sliding_window or 0),
        softcap=np.float32(logit_softcap or 0.0),
        interleaved=interleaved,
        eps=np.float32(eps),
        isa=isa,
    )
