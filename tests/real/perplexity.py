"""Log-probabilities of a text through the public API, window by window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.real.model import RealModel

SCORE = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def text_logprobs(model: RealModel, pieces: Sequence[Sequence[int]]) -> np.ndarray:
    """Return that of every token but the first of each piece, one piece after another."""
    with model.engine() as engine, LLM.from_loaded(model.loaded(engine)) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(piece)} for piece in pieces], SCORE)
        assert llm.stats.compilations_after_warmup == 0
    return np.array(
        [
            entry[token].logprob
            for piece, output in zip(pieces, outputs, strict=True)
            for token, entry in zip(piece[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


def perplexity(logprobs: np.ndarray) -> float:
    """Return e to the mean surprise."""
    return float(np.exp(-logprobs.mean(dtype=np.float64)))
