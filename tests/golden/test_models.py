"""Logits and greedy transcripts equal the reference implementation's (see models/generate.py)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams
from tests.engines import GOLDEN, Work, logits_of, make_engine, run_tokens

CHECKPOINTS = sorted(
    path.name if path.is_dir() else f"{path.name}"
    for path in GOLDEN.iterdir()
    if path.is_dir() and (path / "config.json").exists() or path.suffix == ".gguf"
)
# By the scope, pytest runs all tests of one checkpoint before those of the next.
every_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS, scope="module")
BUCKETS = (8, 64)
PROMPTS = ("short", "medium", "long")

# float32 against float32 in another order of summation; the bound.
TOLERANCE = 2e-4


def golden(checkpoint: str) -> dict[str, np.ndarray]:
    """Return the goldens of a checkpoint."""
    with np.load(GOLDEN / f"{checkpoint.removesuffix('.gguf')}.npz") as data:
        return dict(data)


def test_every_golden_is_tested() -> None:
    """A new golden cannot be forgotten: it belongs to a checkpoint here or to the real model."""
    names = {name.removesuffix(".gguf") for name in CHECKPOINTS}
    assert {p.stem for p in GOLDEN.glob("*.npz")} - {"smollm2_135m"} == names
    assert len(names) >= 10


@every_checkpoint
@pytest.mark.parametrize("chunk", [64, 7, 1], ids=["one-shot", "chunks", "token by token"])
def test_logits_equal_the_reference(checkpoint: str, chunk: int) -> None:
    data = golden(checkpoint)
    engine = make_engine(checkpoint, BUCKETS)
    for prompt in PROMPTS:
        logits = logits_of(engine, data[f"{prompt}_token_ids"], chunk)
        error = np.abs(logits - data[f"{prompt}_logits"]).max()
        assert error <= TOLERANCE, f"{checkpoint} {prompt}: {error}"


@every_checkpoint
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_greedy_transcripts_equal_the_reference(checkpoint: str, overlap: bool) -> None:
    data = golden(checkpoint)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    work = {p: Work(tuple(data[f"{p}_token_ids"].tolist()), params) for p in PROMPTS}
    tokens = run_tokens(make_engine(checkpoint, BUCKETS, overlap=overlap), work)
    for prompt in PROMPTS:
        assert tokens[prompt] == data[f"{prompt}_greedy"].tolist()


def test_bfloat16_stays_near_the_reference() -> None:
    """Eight bits of mantissa over a few layers: a few percent of the logits' spread."""
    data = golden("smollm2")
    logits = logits_of(make_engine("smollm2", dtype="bfloat16"), data["medium_token_ids"], 64)
    assert logits.dtype == jnp.float32
    spread = data["medium_logits"].std()
    assert np.abs(logits - data["medium_logits"]).max() <= 0.15 * spread
