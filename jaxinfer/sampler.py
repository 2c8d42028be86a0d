"""Logits → tokens, on the device: pure functions of arrays, compiled once per bucket `B`.

Knows no request and no host: what a row wants stands in `SamplingInputs`, the tokens so far in
`History`. Order of a step, per row: raw logits (corruption, logprobs) → logit bias → allowed ids →
penalties → processors → greedy, or temperature → top-k → top-p → min-p → draw.

Two rules hold everywhere. Whatever costs a pass over the vocabulary runs under `lax.cond`, "does
any row need it", so a greedy batch pays for an argmax. And a branch taken for one row's sake leaves
the others bitwise as they were, so that a result never depends on neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.batch import SampledTokens
from jaxinfer.selection import Shards, bisect, highest, race, take, top_entries, top_values
from pallas_kernels.shapes import Array, Bool, Float, Int

HISTORY_BLOCK = 256  # positions a trip of the penalties' loop
NUM_CANDIDATES = 128  # likeliest tokens in which top-k and top-p thresholds are looked for first

jax.tree_util.register_dataclass(
    SampledTokens,
    data_fields=[
        "token_ids", "corrupted", "logprobs", "ranks", "top_token_ids", "top_logprobs",
    ],
    meta_fields=[],
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """What each row asks for, packed by `jaxinfer.sampling_batch`. Padding rows are greedy.

    Attributes:
        temperature: float32 [B], 0 for greedy rows.
        top_k: int32 [B], ≤ 0 keeps all. Ties of the k-th likeliest token are all kept.
        top_p: float32 [B], 1 keeps all. The least likely of the smallest set that reaches `top_p`
            of what top-k left brings its ties along.
        min_p: float32 [B], relative to the likeliest token, after temperature.
        repetition_penalty: float32 [B], over prompt and output.
        presence_penalty: float32 [B], over the output.
        frequency_penalty: float32 [B], over the output.
        seeds: uint32 [B, 2], high and low word: the threefry key of the row.
        positions: int32 [B], index in the sequence of the token being sampled.
        prompt_lens: int32 [B].
        wants_logprobs: bool [B]; other rows get zeros.
        has_bias: bool [B], whether the row's `bias_ids` hold anything.
        has_mask: bool [B], whether the row's `allowed` has a zero.
        bias_ids: int32 [B, M], padded with V.
        bias_values: float32 [B, M], added to the raw logits.
        allowed: uint32 [B, ceil(V / 32)], bit v % 32 of word v // 32 says whether v is possible.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    seeds: Any
    positions: Any
    prompt_lens: Any
    wants_logprobs: Any
    has_bias: Any
    has_mask: Any
    bias_ids: Any
    bias_values: Any
    allowed: Any

    @property
    def sampled(self) -> Bool[Array, " B"]:
        """Whether each row draws."""
        return self.temperature > 0

    @property
    def penalised(self) -> Bool[Array, " B"]:
        """Whether each row's logits depend on the tokens so far."""
        presence, frequency = self.presence_penalty != 0, self.frequency_penalty != 0
        return (self.repetition_penalty != 1) | presence | frequency


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class History:
    """The tokens so far, paged like the KV cache.

    Token s of row b is `token_pages[page_table[b, s // page_size], s % page_size]`.

    Attributes:
        token_pages: int32 [num_pages, page_size].
        page_table: int32 [B, P]; entries past a row's last page may be anything.
        seq_lens: int32 [B], tokens that count; 0 for padding rows.
    """

    token_pages: Any
    page_table: Any
    seq_lens: Any


class Logprobs(NamedTuple):
    """Log-probabilities of the raw distribution at one position a row.

    The last two are `min(max_logprobs, V)` wide, likeliest first, the lower id first among equals.
    """

    logprobs: Array  # float32 [B], of the row's own token
    ranks: Array  # int32 [B], 1 + how many tokens are strictly likelier
    top_token_ids: Array  # int32 [B, K]
    top_logprobs: Array  # float32 [B, K]


def sample(
    logits: Float[Array, "B V"],
    inputs: SamplingInputs,
    history: History,
    *,
    max_logprobs: int,
    shards: Shards | None = None,
) -> SampledTokens:
    """Return a token for each row of float32 `logits`, whose shape alone decides the graph.

    A row is corrupted, and its token means nothing, if its logits hold a NaN or +inf, or if nothing
    is left to choose from (masks and -inf logits rule every token out). `max_logprobs` is the
    static width of the alternatives. `shards` tells how the vocabulary is divided among
    devices: no more than the likeliest tokens of each leave it.
    """
    peak, token_ids = highest(logits)
    corrupted = ~jnp.isfinite(peak)
    edited = inputs.has_bias | inputs.has_mask | inputs.penalised
    token_ids, peak = lax.cond(
        jnp.any(edited | inputs.sampled),
        lambda: _choose(logits, inputs, history, shards),
        lambda: (token_ids, peak),
    )
    return _report(logits, token_ids, corrupted | ~jnp.isfinite(peak), inputs, max_logprobs, shards)


def sample_processed[Extra](
    logits: Float[Array, "B V"],
    inputs: SamplingInputs,
    history: History,
    process: Callable[[Array], tuple[Array, Extra]],
    *,
    max_logprobs: int,
    shards: Shards | None = None,
) -> tuple[SampledTokens, Extra]:
    """Do what `sample` does, with `process` on the logits [B, V] behind the penalties.

    Log-probabilities stay those of the raw logits. Also returns what else `process` does.
    """
    corrupted = ~jnp.isfinite(highest(logits)[0])
    processed, extra = process(_edit(logits, inputs, history))
    token_ids, peak = _pick(processed, inputs, shards)
    corrupted |= ~jnp.isfinite(peak)
    return _report(logits, token_ids, corrupted, inputs, max_logprobs, shards), extra


def _report(
    logits: Array,
    token_ids: Array,
    corrupted: Array,
    inputs: SamplingInputs,
    max_logprobs: int,
    shards: Shards | None,
) -> SampledTokens:
    """Return the tokens, with what the raw `logits` say of those that were asked about."""
    wanted = inputs.wants_logprobs & ~corrupted
    none = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(lambda: token_logprobs(logits, token_ids, max_logprobs)),
    )
    found = lax.cond(
        jnp.any(wanted),
        lambda: token_logprobs(logits, token_ids, max_logprobs, shards),
        lambda: none,
    )
    return SampledTokens(
        token_ids=token_ids,
        corrupted=corrupted,
        logprobs=jnp.where(wanted, found.logprobs, 0),
        ranks=jnp.where(wanted, found.ranks, 0),
        top_token_ids=jnp.where(wanted[:, None], found.top_token_ids, 0),
        top_logprobs=jnp.where(wanted[:, None], found.top_logprobs, 0),
    )


@jax.named_scope("logprobs")
def token_logprobs(
    logits: Float[Array, "B V"],
    token_ids: Int[Array, " B"],
    max_logprobs: int,
    shards: Shards | None = None,
) -> Logprobs:
    """Return the log-probabilities of `token_ids` [B] and of the likeliest under `logits` [B, V].

    Serves sampled tokens and, with B the prompt positions of a chunk, prompt scoring. Raw: the
    caller's bias, penalties and temperature play no part.
    """
    peak = jnp.max(logits, axis=-1, keepdims=True)
    scale = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))
    own = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    ranks = 1 + jnp.sum(logits > own, axis=-1, dtype=jnp.int32)
    top, top_ids = top_entries(logits, min(max_logprobs, logits.shape[-1]), shards)
    return Logprobs((own - peak - scale)[:, 0], ranks, top_ids, top - peak - scale)


def _choose(
    logits: Array, inputs: SamplingInputs, history: History, shards: Shards | None
) -> tuple[Array, Array]:
    """Return each row's token and its highest logit after bias, mask and penalties."""
    return _pick(_edit(logits, inputs, history), inputs, shards)


def _edit(logits: Array, inputs: SamplingInputs, history: History) -> Array:
    """Return the logits after bias, mask and penalties."""
    for needed, edit in (
        (inputs.has_bias, lambda x: _add_bias(x, inputs)),
        (inputs.has_mask, lambda x: _mask(x, inputs.allowed)),
        (inputs.penalised, lambda x: _penalise(x, inputs, history)),
    ):
        logits = lax.cond(jnp.any(needed), edit, lambda x: x, logits)
    return logits


def _pick(logits: Array, inputs: SamplingInputs, shards: Shards | None) -> tuple[Array, Array]:
    """Return each row's token, drawn or the likeliest, and its highest logit."""
    peak, token_ids = highest(logits)
    token_ids = lax.cond(
        jnp.any(inputs.sampled),
        lambda: jnp.where(inputs.sampled, _draw(logits, peak, inputs, shards), token_ids),
        lambda: token_ids,
    )
    return token_ids, peak


@jax.named_scope("bias")
def _add_bias(logits: Array, inputs: SamplingInputs) -> Array:
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, inputs.bias_ids].add(inputs.bias_values, mode="drop")


@jax.named_scope("mask")
def _mask(logits: Array, allowed: Array) -> Array:
    B, V = logits.shape
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None]
    bits = (allowed[:, :, None] >> shifts) & 1  # [B, V/32, 32]
    return jnp.where(bits.reshape(B, -1)[:, :V] != 0, logits, -jnp.inf)


@jax.named_scope("penalties")
def _penalise(logits: Array, inputs: SamplingInputs, history: History) -> Array:
    """Apply the penalties in vLLM's order: repetition (CTRL, arXiv:1909.05858), then the others."""
    in_prompt, in_output = _count_tokens(history, inputs, logits.shape[-1])
    factor = inputs.repetition_penalty[:, None]
    seen = (in_prompt + in_output) > 0
    x = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    x -= inputs.frequency_penalty[:, None] * in_output.astype(jnp.float32)
    x -= inputs.presence_penalty[:, None] * (in_output > 0).astype(jnp.float32)
    return jnp.where(inputs.penalised[:, None], x, logits)


def _count_tokens(history: History, inputs: SamplingInputs, V: int) -> tuple[Array, Array]:
    """Return how often each token occurs in prompt and output, int32 [B, V] each.

    Runs over blocks of positions as far as the longest penalised row reaches: work follows the
    tokens there are, memory does not follow the context length.
    """
    B, page_size = history.page_table.shape[0], history.token_pages.shape[1]
    lens = jnp.where(inputs.penalised, history.seq_lens, 0)
    rows = jnp.arange(B, dtype=jnp.int32)[:, None]

    def add_block(i: Array, counts: Array) -> Array:
        s = (i * HISTORY_BLOCK + jnp.arange(HISTORY_BLOCK, dtype=jnp.int32))[None]  # [1, block]
        live = s < lens[:, None]  # [B, block]
        pages = history.page_table.at[rows, s // page_size].get(mode="clip")
        tokens = history.token_pages.at[jnp.where(live, pages, 0), s % page_size].get(mode="clip")
        part = (s >= inputs.prompt_lens[:, None]).astype(jnp.int32)  # 0 prompt, 1 output
        return counts.at[part, rows, jnp.where(live, tokens, V)].add(1, mode="drop")

    trips = (jnp.max(lens) + HISTORY_BLOCK - 1) // HISTORY_BLOCK
    counts = lax.fori_loop(0, trips, add_block, jnp.zeros((2, B, V), jnp.int32))
    return counts[0], counts[1]


@jax.named_scope("draw")
def _draw(logits: Array, peak: Array, inputs: SamplingInputs, shards: Shards | None) -> Array:
    """Return a token a row, drawn with probability proportional to exp(logit / temperature).

    Seed and position make the row's key, so the draw depends on nothing else.
    """
    # Shifted before it is divided: the likeliest weighs exactly 1 at any temperature.
    weights = jnp.exp((logits - peak[:, None]) / _divisor(inputs)[:, None])
    limited = inputs.sampled & ((inputs.top_k > 0) | (inputs.top_p < 1))
    weights = lax.cond(
        jnp.any(limited),
        lambda: _keep_likeliest(logits, weights, inputs, shards),
        lambda: weights,
    )
    weights = jnp.where(weights >= inputs.min_p[:, None], weights, 0)
    keys = jax.random.wrap_key_data(inputs.seeds, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, inputs.positions)
    return race(weights, keys)


def _keep_likeliest(
    logits: Array, weights: Array, inputs: SamplingInputs, shards: Shards | None
) -> Array:
    """Return `weights` [B, V] with zeros outside top-k, then outside top-p of what that left.

    No sort of the vocabulary: both limits are thresholds, found among the likeliest few candidates
    or, for a row where those do not suffice (a flat distribution, a large k), by bisection.
    """
    V, k, p = logits.shape[-1], inputs.top_k, inputs.top_p
    top = top_values(logits, min(NUM_CANDIDATES, V), shards)  # [B, K]
    K = top.shape[-1]

    cut = inputs.sampled & (k > 0) & (k < V)
    kth = jnp.where(cut, take(top, jnp.clip(k, 1, K) - 1), -jnp.inf)
    kth = bisect(
        lambda x: jnp.sum(logits >= x[:, None], axis=-1, dtype=jnp.int32) >= k,
        low=jnp.where(cut & (k > K), -jnp.inf, kth),
        high=kth,
    )
    weights = jnp.where(logits >= kth[:, None], weights, 0)

    cut = inputs.sampled & (p < 1)
    goal = p * jnp.sum(weights, axis=-1)
    top_weights = jnp.exp((top - top[:, :1]) / _divisor(inputs)[:, None])
    top_weights = jnp.where(top >= kth[:, None], top_weights, 0)
    rank = jnp.sum(jnp.cumsum(top_weights, axis=-1) < goal[:, None], axis=-1, dtype=jnp.int32)
    deep = cut & (rank == K) & (top_weights[:, -1] > 0)
    last = jnp.where(cut & ~deep, take(top, jnp.minimum(rank, K - 1)), -jnp.inf)
    least = bisect(
        lambda w: jnp.sum(jnp.where(weights >= w[:, None], weights, 0), axis=-1) >= goal,
        low=jnp.zeros_like(p),
        high=jnp.where(deep, 1.0, 0.0),
    )
    return jnp.where((logits >= last[:, None]) & (weights >= least[:, None]), weights, 0)


def _divisor(inputs: SamplingInputs) -> Array:
    """Return what to divide the logits by: the temperature, 1 for greedy rows."""
    return jnp.where(inputs.sampled, inputs.temperature, 1)
