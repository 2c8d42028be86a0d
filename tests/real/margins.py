"""How close a choice was: the float noise between batch shapes can only flip what nearly tied."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from tests.engines import Work, logits_of
from tests.real.model import RealModel
from tests.unit.sampler.oracle import distribution, edited_logits


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the first index at which two outputs differ."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def margin(real: RealModel, work: Work, output: Sequence[int], index: int) -> str:
    """Describe how decided the choice of `output[index]` was, from logits in float32.

    Greedy: how far the winner's logit is above the second. Sampled: how much longer the second
    took in the race, relative to the winner (see `jaxinfer.selection.race`).
    """
    tokens = [*work.prompt, *output[:index]]
    with real.engine() as engine:
        logits = logits_of(engine, np.asarray(tokens, np.int32), 512)[-1]
    params = work.params
    ends = sorted(real.tokenizer.eos_token_ids)
    x = edited_logits(logits, params, work.prompt, output[:index], ends)
    if params.greedy:
        first, second = np.argsort(-x)[:2]
        return f"greedy {first} or {second}: logits {x[first] - x[second]:.2e} apart"
    weights = distribution(x, params)
    times = _race_times(work.seed, len(tokens), len(x))
    finish = np.divide(times, weights, out=np.full(len(x), np.inf), where=weights > 0)
    first, second = np.argsort(finish)[:2]
    return f"drawn {first} or {second}: times {finish[second] / finish[first] - 1:.2e} apart"


def _race_times(seed: int, position: int, vocab_size: int) -> np.ndarray:
    words = np.array([seed % 2**64 >> 32, seed & 0xFFFFFFFF], np.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    with jax.threefry_partitionable(True):
        bits = np.asarray(jax.random.bits(key, (vocab_size,), "uint32"))
    return -np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32)
