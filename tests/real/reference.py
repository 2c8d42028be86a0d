"""What the reference says of the real models, and the same measure through the public API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.engines import GOLDEN
from tests.real.model import RealModel

SCORE = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def load_golden(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a golden of `tests/golden/real`, and its `meta`."""
    with np.load(GOLDEN.parent / "real" / f"{name}.npz") as data:
        arrays = dict(data)
    return arrays, json.loads(str(arrays.pop("meta")))


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
