"""The one entry to attention over pages; it picks the implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.capability import GENERATIONS, Problem, choose, current_device
from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Float, Int
from pallas_kernels.tiles import TileKey, decode_tiles, prefill_tiles
from pallas_kernels.xla_attention import xla_paged_attention

FIXED_SPLIT_LEN = 1024
"""Keys of a split of decode where a row's result must not depend on other rows."""


def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "num_pages K page_size H"] | Int[Array, "num_pages K page_size H"],
    v_pages: Float[Array, "num_pages K page_size H"] | Int[Array, "num_pages K page_size H"],
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Float[Array, "num_pages K page_size"] | None = None,
    v_scales: Float[Array, "num_pages K page_size"] | None = None,
    max_query_len: int = 1,
    deterministic: bool = False,
    impl: str = "auto",
) -> Float[Array, "T N H"]:
    """Return causal attention of each row's new tokens over the row's pages.

    The new tokens' keys and values must already stand in the pages. The token at offset j of a row
    sits at position `seq_len - row_len + j` and sees keys at (position - window, position].

    Args:
        q: Queries, packed as `batch` says.
        k_pages: Keys by page; `num_pages` is that of the pool. A float type, or int8 or
            float8_e4m3fn with scales.
        v_pages: Values by page.
        batch: Which tokens and pages belong together.
        scale: Multiplies the scores; positive. Scores are finite up to 1e9: beyond, a GPU's fused
            multiply-add overflows.
        sliding_window: Keys visible to a token, itself included; None for all.
        logit_softcap: Scores become `cap * tanh(score / cap)` (Gemma 2, arXiv:2408.00118), to
            within 1e-7 of the cap: caps of thousands cost digits.
        sinks: Per head, a score that takes part in the softmax with a value of zero (GPT-OSS,
            arXiv:2309.17453).
        k_scales: float32; each key is the stored one times its scale.
        v_scales: float32; each value is the stored one times its scale.
        max_query_len: Most tokens of a decode row, at least 1. With more than 1 the batch's decode
            rows may have 1 to so many, as when drafts are verified: their keys are divided among
            programs, which those of a chunk are not.
        deterministic: Make a row's result bitwise the same whatever the other rows and the padded
            sizes are, at the cost of dividing work less evenly.
        impl: One of `capability.IMPLEMENTATIONS`.

    Returns:
        [T, N, H] in q's dtype; zeros for tokens of no row.

    Raises:
        NotImplementedError: The forced implementation cannot do this on this device.
        ValueError: `max_query_len` is less than 1.
    """
    if max_query_len < 1:
        raise ValueError(f"{max_query_len=} must be at least 1: decode rows have tokens")
    device = current_device()
    optional = {"sinks": sinks, "k_scales": k_scales, "v_scales": v_scales}
    return _paged_attention(
        q,
        k_pages,
        v_pages,
        batch,
        {name: array for name, array in optional.items() if array is not None},
        rule=(
            ("scale", scale),
            ("sliding_window", sliding_window),
            ("logit_softcap", logit_softcap),
        ),
        max_query_len=max_query_len,
        deterministic=deterministic,
        impl=choose(impl, device, Problem.of(q, k_pages)),
        # Interpreted kernels are cut up as for the newest GPU that has been measured.
        generation=device.generation or GENERATIONS[2],
    )


# jitted so that a model's layers, which all call it with the same shapes, share one trace: 0.3 s
# instead of 1.2 s to lower 30 layers.
@partial(jax.jit, static_argnames=("rule", "max_query_len", "deterministic", "impl", "generation"))
def _paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    batch: RaggedBatch,
    optional: dict[str, Array],
    *,
    rule: tuple[tuple[str, Any], ...],
    max_query_len: int,
    deterministic: bool,
    impl: str,
    generation: str,
) -> Array:
    how: dict[str, Any] = {**dict(rule), **optional}
    if impl == "xla":
        # Always deterministic: its blocks of keys are the same for every row. It has no use for
        # rows that are a little longer than one token, and takes them as chunks.
        if max_query_len > 1:
            batch = batch._replace(num_decode_rows=jnp.zeros_like(batch.num_decode_rows))
        return xla_paged_attention(q, k_pages, v_pages, batch, **how)
    key = TileKey.of(generation, q.shape[2], q.dtype, k_pages.dtype)
    paged_decode, paged_prefill = _kernels(impl, key)
    with jax.named_scope("decode_rows"):
        split_len = FIXED_SPLIT_LEN if deterministic else None
        sizes = {"max_query_len": max_query_len, "split_len": split_len}
        out = paged_decode(q, k_pages, v_pages, batch, **sizes, **how)
    if q.shape[0] == 1:
        return out
    with jax.named_scope("chunk_tiles"):
        return paged_prefill(q, k_pages, v_pages, batch, out, **how)


def _kernels(impl: str, key: TileKey) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """Return decode and prefill, with their tile sizes.

    Imported only here, so that a jaxlib without one of the compilers can still do the rest.
    """
    if impl == "mosaic":
        from pallas_kernels import mosaic

        return (
            partial(mosaic.paged_decode, tiles=mosaic.default_decode_tiles(key.head_dim)),
            partial(mosaic.paged_prefill, tiles=mosaic.default_prefill_tiles(key.head_dim)),
        )
    from pallas_kernels.triton.decode import paged_decode
    from pallas_kernels.triton.prefill import paged_prefill

    interpret = impl == "interpret"
    return (
        partial(paged_decode, tiles=decode_tiles(key), interpret=interpret),
        partial(paged_prefill, tiles=prefill_tiles(key), interpret=interpret),
    )
