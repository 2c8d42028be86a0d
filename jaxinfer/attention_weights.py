"""What a token's attention gave weight to, in plain jnp: for looking, not for serving.

Kernels never write the weights down. Here they are made again for the tokens that somebody asks
for, from the same queries and the same stored keys.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels import KVPages, RaggedBatch
from pallas_kernels.shapes import Array, Bool, Float, Int

TOKENS_AT_ONCE = 8
"""Each gathers the keys of its sequence, so all at once would take that much memory."""


def softmax_weights(
    q: Float[Array, "N H"],
    k: Float[Array, "S K H"],
    visible: Bool[Array, " S"],
    *,
    scale: float,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "N S"]:
    """Return one token's float32 weights; 0 for keys that it does not see.

    Sinks take part in the softmax as one more key, which is then left out.
    """
    N, H = q.shape
    S, K, _ = k.shape
    queries = q.reshape(K, N // K, H).astype(jnp.float32)
    scores = jnp.einsum("KGH,SKH->KGS", queries, k.astype(jnp.float32)).reshape(N, S) * scale
    if logit_softcap is not None:
        scores = logit_softcap * jnp.tanh(scores / logit_softcap)
    scores = jnp.where(visible[None], scores, -jnp.inf)
    if sinks is not None:
        scores = jnp.concatenate([scores, sinks.astype(jnp.float32)[:, None]], axis=1)
    top = lax.stop_gradient(jnp.max(scores, axis=1, keepdims=True))
    # A padding token sees no key at all.
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1e-30)
    return weights[:, :S]


def visible_keys(position: Int[Array, ""], num_keys: int, sliding_window: int | None) -> Array:
    """Return bool [S]: which keys a token at this position sees, itself included."""
    distance = position - jnp.arange(num_keys, dtype=jnp.int32)
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)


def paged_weights(
    q: Float[Array, "T N H"],
    pages: KVPages,
    batch: RaggedBatch,
    tokens: Int[Array, " C"] | None,
    num_keys: int | None,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "C N S"]:
    """Return the weights of some of a step's tokens over the keys in their rows' pages.

    Args:
        q: Queries of all tokens.
        pages: The layer's, the step's own keys included.
        batch: Which tokens and pages belong to which row.
        tokens: Indices; None for all.
        num_keys: S; None for all that a row's pages hold.
        scale: Multiplies the scores.
        sliding_window: Keys visible to a token, itself included.
        logit_softcap: Scores become `cap * tanh(score / cap)`.
        sinks: Each head's score of a key without a value.
    """
    T = q.shape[0]
    _, K, page_size, H = pages.k_pages.shape
    P = batch.page_table.shape[1]
    num_pages = P if num_keys is None else min(P, -(-num_keys // page_size))
    S = num_pages * page_size if num_keys is None else num_keys
    if tokens is None:
        tokens = jnp.arange(T, dtype=jnp.int32)
    rows = jnp.searchsorted(batch.query_start_loc, tokens, side="right").astype(jnp.int32) - 1
    rows = jnp.clip(rows, 0, batch.page_table.shape[0] - 1)
    positions = batch.seq_lens[rows] - (batch.query_start_loc[rows + 1] - tokens)

    def one(token: tuple[Array, Array, Array]) -> Array:
        index, row, position = token
        ids = batch.page_table[row, :num_pages]
        k = pages.k_pages.at[ids].get(mode="clip").astype(jnp.float32)  # [pages, K, page_size, H]
        if pages.k_scales is not None:
            k = k * pages.k_scales.at[ids].get(mode="clip")[..., None]
        k = jnp.moveaxis(k, 2, 1).reshape(num_pages * page_size, K, H)
        k = jnp.pad(k, ((0, max(0, S - k.shape[0])), (0, 0), (0, 0)))[:S]
        visible = visible_keys(position, S, sliding_window)
        # What a page's unused slots hold may be no number.
        k = jnp.where(visible[:, None, None], k, 0.0)
        return softmax_weights(
            q[index], k, visible, scale=scale, logit_softcap=logit_softcap, sinks=sinks
        )

    at_once = min(TOKENS_AT_ONCE, tokens.shape[0])
    return lax.map(one, (tokens, rows, positions), batch_size=at_once)
