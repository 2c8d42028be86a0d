"""The one entry to attention over pages; it picks the implementation."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.shapes import Array, Float
from pallas_kernels.xla_attention import xla_paged_attention

IMPLEMENTATIONS = ("xla",)


# jitted so that a model's layers, which all call it with the same shapes, share one trace: 0.3 s
# instead of 1.2 s to lower 30 layers.
@partial(jax.jit, static_argnames=("scale", "sliding_window", "logit_softcap", "impl"))
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
    impl: str = "auto",
) -> Float[Array, "T N H"]:
    """Return causal attention of each row's new tokens over the row's pages.

    The new tokens' keys and values must already stand in the pages. The token at offset j of a row
    sits at position `seq_len - row_len + j` and sees keys at (position - window, position].

    Args:
        q: Queries, packed as `batch` says.
        k_pages: Keys by page; `num_pages` is that of the pool.
        v_pages: Values by page.
        batch: Which tokens and pages belong together.
        scale: Multiplies the scores.
        sliding_window: Keys visible to a token, itself included; None for all.
        logit_softcap: Scores become `cap * tanh(score / cap)` (Gemma 2, arXiv:2408.00118).
        sinks: Per head, a score that takes part in the softmax with a value of zero (GPT-OSS,
            arXiv:2309.17453).
        impl: "auto" or one of `IMPLEMENTATIONS`.

    Returns:
        [T, N, H] in q's dtype; zeros for tokens of no row.

    Raises:
        NotImplementedError: The forced implementation does not exist on this device.
    """
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise NotImplementedError(
            f"attention implementation {impl!r} is not available; use one of "
            f"{', '.join(('auto', *IMPLEMENTATIONS))}"
        )
    return xla_paged_attention(
        q,
        k_pages,
        v_pages,
        batch,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=sinks,
    )
