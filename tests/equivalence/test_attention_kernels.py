"""The GPU's attention kernels give the tokens that plain XLA gives: whole engines, interpreted."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams
from tests.engines import Work, make_engine, run_tokens

WORK = {
    name: Work(
        tuple(int(t) for t in np.random.default_rng(length).integers(3, 300, length)),
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    )
    for name, length in {"short": 3, "long": 70, "page": 8, "other": 41}.items()
}
"""Prompts within and beyond one step, some of which run while others are still read."""


# Both have grouped heads and windows; one caps its scores, the other has sinks.
@pytest.mark.parametrize("model", ["gemma2", "gpt_oss"])
def test_interpreted_kernels_give_the_tokens_of_xla(model: str) -> None:
    def tokens(impl: str) -> dict[str, list[int]]:
        engine = make_engine(model, buckets=(8, 32), max_num_seqs=4, attention_impl=impl,
                             max_num_batched_tokens=32)  # fmt: skip
        return run_tokens(engine, WORK)

    assert tokens("interpret") == tokens("xla")
