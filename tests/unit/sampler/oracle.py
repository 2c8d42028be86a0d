"""What the sampler should do, in float64 numpy with plain sorts, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.sampling_params import SamplingParams


def edited_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Sequence[int] = (),
) -> np.ndarray:
    """Bias, masks and penalties, in that order."""
    x = logits.astype(np.float64)
    for token, value in (params.logit_bias or {}).items():
        x[token] += value
    if params.allowed_token_ids is not None:
        x[[v for v in range(len(x)) if v not in params.allowed_token_ids]] = -np.inf
    history = [*prompt, *output]
    for words in params.bad_words_token_ids:
        if len(words) == 1 or tuple(history[1 - len(words) :]) == words[:-1]:
            x[words[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[[*ends, *params.stop_token_ids]] = -np.inf
    for token in set(history):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token)
        x[token] -= params.presence_penalty
    return x


def distribution(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p and min-p of edited logits; ties at a limit stay together."""
    if params.greedy or params.top_k == 1:
        return np.eye(len(x))[int(np.argmax(x))]
    weights = np.exp((x - x.max()) / params.temperature)
    if 0 < params.top_k < len(x):
        weights[x < np.sort(x)[-params.top_k]] = 0
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order])
        last = order[np.searchsorted(reached, params.top_p * reached[-1])]
        weights[weights < weights[last]] = 0
    weights[weights < params.min_p] = 0
    return weights / weights.sum()


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())
