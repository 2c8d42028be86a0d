"""The default model is as surprised by a text as the reference is, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden.real.prompts import SMOLLM2_WINDOW, TEXT, windows
from tests.real.model import RealModel
from tests.real.reference import load_golden, perplexity, text_logprobs

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

# float32 against float32 of the same weights: far closer than the half percent promised.
TOLERANCE = 2e-4


def test_perplexity_equals_the_reference(real: RealModel) -> None:
    golden, meta = load_golden("smollm2_135m")
    token_ids = real.tokenizer.encode(TEXT)
    assert token_ids == golden["text_token_ids"].tolist()
    assert meta["window"] == SMOLLM2_WINDOW
    logprobs = text_logprobs(real, windows(token_ids, SMOLLM2_WINDOW))
    assert perplexity(logprobs) == pytest.approx(meta["perplexity"], rel=0.005)
    error = np.abs(logprobs - golden["text_logprobs"]).max()
    assert error <= TOLERANCE, f"the worst token is off by {error}"
