"""Log-probabilities of tokens that a request names are those of the logits, in any company."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxinfer.sampling_params import SamplingParams
from tests.engines import Work, head_of, hidden_of, make_engine, run

NAME = "llama2"
PROMPT = tuple(range(5, 30))
# More than one call of the scoring program takes.
NAMED = tuple(range(1, 80, 2))


@pytest.mark.parametrize("overlap", [True, False])
def test_they_are_those_of_the_logits_at_each_position(overlap):
    engine = make_engine(NAME, overlap=overlap, max_num_batched_tokens=16)
    params = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2, logprob_token_ids=NAMED
    )
    plain = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1)
    outputs = run(engine, {"a": Work(PROMPT[3:], plain), "named": Work(PROMPT, params)})
    entries = [entry for output in outputs["named"] for entry in output.logprobs]
    tokens = [token for output in outputs["named"] for token in output.new_token_ids]
    sequence = np.asarray([*PROMPT, *tokens[:-1]])
    logits = head_of(engine, hidden_of(engine, sequence, 16))[len(PROMPT) - 1 :]
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    assert len(entries) == len(tokens) == 6
    for entry, row in zip(entries, expected, strict=True):
        values, ranks = np.transpose(entry.asked)
        np.testing.assert_allclose(values, row[list(NAMED)], atol=1e-4)
        assert ranks.tolist() == [1 + int(np.sum(row > row[i])) for i in NAMED]
    assert all(not entry.asked for output in outputs["a"] for entry in output.logprobs)
