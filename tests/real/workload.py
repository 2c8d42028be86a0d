"""Requests of every kind over real text: lengths, greedy and seeded, limits, penalties, ends."""

from __future__ import annotations

import itertools

import numpy as np

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer
from tests.engines import Work
from tests.golden.models.real_prompts import LONG_TEXT

PROMPT_LENS = (3, 700)
OUTPUT_LENS = (1, 200)
NUM_DOCUMENTS = 8

KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.3, "min_p": 0.05, "presence_penalty": 0.8},
    {"temperature": 0.0, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logit_bias": {28: 2.0, 30: -5.0}, "min_tokens": 1},
    {"temperature": 0.8, "top_k": 5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "ignore_eos": False},
    {"temperature": 1.1, "top_p": 0.6, "ignore_eos": False},
)
"""Greedy and sampled in turns."""


def mixed_work(
    tokenizer: Tokenizer,
    *,
    count: int = 64,
    prompt_lens: tuple[int, int] = PROMPT_LENS,
    output_lens: tuple[int, int] = OUTPUT_LENS,
    skew: float = 1.0,
    seed: int = 0,
) -> dict[str, Work]:
    """Return requests of the shortest to the longest prompts and outputs, in random order.

    Args:
        tokenizer: The model's.
        count: Requests, at least 2: both ends of both ranges are always there.
        prompt_lens: Tokens, from and to.
        output_lens: Tokens, from and to; some end earlier.
        skew: 1 spreads the lengths evenly on a logarithmic scale; more makes most of them short.
        seed: Decides which lengths meet, the texts and the seeds of the requests.
    """
    rng = np.random.default_rng(seed)
    documents = [_document(tokenizer, rng) for _ in range(NUM_DOCUMENTS)]
    prompts = rng.permutation(_lengths(*prompt_lens, count, skew))
    outputs = rng.permutation(_lengths(*output_lens, count, skew))
    work = {}
    for i, kind in zip(range(count), itertools.cycle(KINDS), strict=False):
        params = SamplingParams(**{"max_tokens": int(outputs[i]), "ignore_eos": True, **kind})
        # Requests of one document share a prefix.
        prompt = documents[i % NUM_DOCUMENTS][: prompts[i]]
        work[f"r{i}"] = Work(tuple(prompt), params, seed=int(rng.integers(2**32)))
    return work


def _lengths(low: int, high: int, count: int, skew: float) -> np.ndarray:
    quantiles = np.linspace(0, 1, count) ** skew
    return np.rint(low * (high / low) ** quantiles).astype(int)


def _document(tokenizer: Tokenizer, rng: np.random.Generator) -> list[int]:
    """Return as many tokens as the longest prompt has: a story's sentences in some order."""
    sentences = LONG_TEXT.split(". ")
    text = ". ".join(s for _ in range(3) for s in rng.permutation(sentences))
    token_ids = tokenizer.encode(text)
    assert len(token_ids) >= PROMPT_LENS[1]
    return token_ids
