"""Runs the sampler as the model runner does: requests, a paged history, one jitted function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch import SampledTokens, ScheduledRow
from jaxinfer.request import Request
from jaxinfer.sampler import History, SamplingInputs, sample
from jaxinfer.sampling_batch import SamplingPacker, neutral_bias, neutral_mask, unpack_sampling
from jaxinfer.sampling_params import SamplingParams

PAGE_SIZE = 4
MAX_PAGES = 200
MAX_LOGPROBS = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sequence about to get a token."""

    logits: np.ndarray
    params: SamplingParams
    seed: int = 0
    prompt: Sequence[int] = (1,)
    output: Sequence[int] = ()
    ends: Sequence[int] = ()

    def scheduled(self, request_id: str = "r") -> ScheduledRow:
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(self.prompt),
            params=self.params,
            seed=self.seed,
            max_total_tokens=10_000,
            eos_token_ids=frozenset(self.ends),
        )
        request.token_ids += self.output
        end = request.num_tokens
        return ScheduledRow(
            request=request, start=end - 1, num_scheduled_tokens=1, samples=True, epoch=0
        )


@jax.jit
def step(logits, history, rows, bias, allowed):
    inputs = unpack_sampling(rows, bias, allowed)
    return sample(logits, inputs, history, max_logprobs=MAX_LOGPROBS)


def inputs_of(rows: Sequence[Row], bucket: int) -> SamplingInputs:
    return unpack_sampling(*_packed(rows, bucket))


def run(rows: Sequence[Row], bucket: int) -> SampledTokens:
    """Return the result for `rows`, padded to `bucket`, as numpy arrays cut to the rows."""
    V = len(rows[0].logits)
    logits = np.full((bucket, V), np.nan, np.float32)  # padding logits may be anything
    logits[: len(rows)] = [row.logits for row in rows]
    result = step(jnp.asarray(logits), paged_history(rows, bucket), *_packed(rows, bucket))
    return jax.tree.map(lambda x: np.asarray(x)[: len(rows)], result)


def tokens(rows: Sequence[Row], bucket: int) -> list[int]:
    return run(rows, bucket).token_ids.tolist()


def paged_history(rows: Sequence[Row], bucket: int) -> History:
    """Scatter the rows' tokens over pages in random order, with garbage wherever none belongs."""
    rng = np.random.default_rng(len(rows))
    num_pages = 1000 + bucket * 70
    pages = rng.integers(-(2**31), 2**31, (num_pages, PAGE_SIZE)).astype(np.int32)
    table = rng.integers(-(2**31), 2**31, (bucket, MAX_PAGES)).astype(np.int32)
    lens = np.zeros(bucket, np.int32)
    free = list(rng.permutation(num_pages))
    for b, row in enumerate(rows):
        history = [*row.prompt, *row.output]
        lens[b] = len(history)
        for i in range(0, len(history), PAGE_SIZE):
            part = history[i : i + PAGE_SIZE]
            table[b, i // PAGE_SIZE] = page = free.pop()
            pages[page, : len(part)] = part
    return History(
        token_pages=jnp.asarray(pages), page_table=jnp.asarray(table), seq_lens=jnp.asarray(lens)
    )


def _packed(rows: Sequence[Row], bucket: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    V = len(rows[0].logits)
    packed = SamplingPacker(V).pack([row.scheduled(str(i)) for i, row in enumerate(rows)], bucket)
    bias = neutral_bias(bucket, V) if packed.bias is None else packed.bias
    allowed = neutral_mask(bucket, V) if packed.allowed is None else packed.allowed
    return jnp.asarray(packed.rows), jnp.asarray(bias), jnp.asarray(allowed)
