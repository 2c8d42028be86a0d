"""The default model is as surprised by a text as the reference is, token by token."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.golden.real.prompts import SMOLLM2_WINDOW, TEXT, windows
from tests.real.model import RealModel
from tests.real.perplexity import perplexity, text_logprobs
from tests.real.test_gemma import REAL_GOLDEN

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_perplexity_equals_the_reference(real: RealModel) -> None:
    with np.load(REAL_GOLDEN / "smollm2_135m.npz") as data:
        golden = dict(data)
    meta = json.loads(str(golden["meta"]))
    token_ids = real.tokenizer.encode(TEXT)
    assert token_ids == golden["text_token_ids"].tolist()
    assert meta["window"] == SMOLLM2_WINDOW
    logprobs = text_logprobs(real, windows(token_ids, SMOLLM2_WINDOW))
    # float32 against float32 of the same weights: far closer than the half percent promised.
    np.testing.assert_allclose(logprobs, golden["text_logprobs"], atol=5e-4)
    assert perplexity(logprobs) == pytest.approx(meta["perplexity"], rel=0.005)
