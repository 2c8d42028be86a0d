"""Gemma 3 270M in four kinds of quantized blocks: it says what the reference says.

Its packages fall under Gemma's own terms and are nobody's dependency: where they are absent, the
tests say how to install them.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams
from tests.engines import Work, logits_of, run_tokens
from tests.golden.real.gemma_file import find_parts, join
from tests.golden.real.prompts import GEMMA_WINDOW, PROMPTS, TEXT, windows
from tests.real.model import RealModel
from tests.real.reference import load_golden, perplexity, text_logprobs

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

# float32 against float32 in another order of summation; the bound.
TOLERANCE = 2e-4
NUM_NEW_TOKENS = 40


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    """Return the model from its GGUF file, every program compiled."""
    try:
        parts = find_parts()
    except FileNotFoundError as absent:
        pytest.skip(str(absent))
    file = join(parts, tmp_path_factory.mktemp("gemma"))
    model = RealModel.load(str(file))
    file.unlink()  # a quarter of a gigabyte; all of it is in memory now
    return model


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_golden("gemma3_270m")[0]


def test_text_becomes_the_same_token_ids(gemma: RealModel, golden) -> None:
    for name, text in PROMPTS.items():
        assert gemma.tokenizer.encode(text) == golden[f"{name}_token_ids"].tolist()


@pytest.mark.parametrize("chunk", [512, 128], ids="chunks of {}".format)
def test_logits_equal_the_reference(gemma: RealModel, golden, chunk: int) -> None:
    with gemma.engine() as engine:
        for prompt in PROMPTS:
            logits = logits_of(engine, golden[f"{prompt}_token_ids"], chunk)
            columns = logits[:, golden["columns"]]
            error = np.abs(columns - golden[f"{prompt}_column_logits"]).max()
            # Of the whole vocabulary, where a quarter of a million logits are too much to keep.
            sums = np.logaddexp.reduce(logits, axis=-1)
            error = max(error, np.abs(sums - golden[f"{prompt}_logsumexp"]).max())
            assert error <= TOLERANCE, f"{prompt}: {error}"


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_greedy_transcripts_equal_the_reference(gemma: RealModel, golden, overlap: bool) -> None:
    window = gemma.source.config["sliding_window"]
    lengths = {prompt: len(golden[f"{prompt}_token_ids"]) for prompt in PROMPTS}
    assert lengths["crossing"] < window < lengths["crossing"] + NUM_NEW_TOKENS
    assert lengths["long"] > window
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    work = {p: Work(tuple(golden[f"{p}_token_ids"].tolist()), params) for p in PROMPTS}
    with gemma.engine(overlap=overlap) as engine:
        tokens = run_tokens(engine, work)
    assert tokens == {p: golden[f"{p}_greedy"].tolist() for p in PROMPTS}


def test_perplexity_equals_the_reference(gemma: RealModel) -> None:
    golden, meta = load_golden("gemma3_270m")
    bos, *token_ids = gemma.tokenizer.encode(TEXT)
    assert token_ids == golden["text_token_ids"].tolist()
    assert meta["window"] == GEMMA_WINDOW > gemma.source.config["sliding_window"]
    logprobs = text_logprobs(gemma, windows(token_ids, GEMMA_WINDOW, [bos]))
    assert perplexity(logprobs) == pytest.approx(meta["perplexity"], rel=0.005)
    error = np.abs(logprobs - golden["text_logprobs"]).max()
    assert error <= 10 * TOLERANCE, f"the worst token is off by {error}"
