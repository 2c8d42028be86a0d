"""Every family gives the reference's logits and transcripts, through the engine, in all its ways.

Two programs a checkpoint (8 and 80 tokens a step) serve all of them: one-shot and in chunks, alone
and among strangers, from a prefix cache, interrupted. See families/generate.py for the goldens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from jaxinfer.engine import Engine
from jaxinfer.models.registry import BUILT_IN, family_of
from jaxinfer.sampling_params import SamplingParams
from tests.engines import (
    FAMILIES,
    GOLDEN,
    Work,
    head_of,
    hidden_of,
    loaded,
    make_engine,
    run_alone,
    run_tokens,
)

# float32 against float32 in another order of summation; the bound.
TOLERANCE = 2e-4

NUM_NEW_TOKENS = 32
MANY, FEW = 80, 8
ORIGINAL_LENGTH = 60
"""Of the RoPE variants that depend on the length, see families/spec.py."""


def _names() -> list[str]:
    return sorted(
        path.name
        for path in FAMILIES.iterdir()
        if path.suffix == ".gguf" or (path / "config.json").exists()
    )


@dataclass(frozen=True)
class Served:
    """A checkpoint, served up to a length, and the prompts whose golden holds then.

    Attributes:
        extends: Whether the transcripts hold too.
    """

    checkpoint: str
    max_model_len: int
    prompts: tuple[str, ...] = ("short", "medium", "long")
    extends: bool = True

    def __str__(self) -> str:
        return f"{self.checkpoint}-{self.max_model_len}"

    def engine(self, **settings) -> Engine:
        return make_engine(
            self.checkpoint, (FEW, MANY), max_model_len=self.max_model_len, **settings
        )

    def golden(self) -> dict[str, np.ndarray]:
        with np.load(FAMILIES / f"{self.checkpoint.removesuffix('.gguf')}.npz") as data:
            return dict(data)


def _served(checkpoint: str) -> list[Served]:
    """The reference takes a new set of frequencies when a sequence outgrows the original length;
    here the longest sequence that is served decides, once. Goldens of either side hold under an
    engine of that side, a sequence that crosses has none, and a dynamic stretch has one for each
    length."""
    if checkpoint == "llama_dynamic":
        past = Served(checkpoint, 72, ("long",), extends=False)
    elif checkpoint.startswith(("llama_longrope", "phi3_longrope", "phi4_mini")):
        past = Served(checkpoint, 128, ("long",))
    else:
        return [Served(checkpoint, 128)]
    return [Served(checkpoint, ORIGINAL_LENGTH, ("short", "medium")), past]


# Those without transcripts last, so that both lists count alike: by the scope, pytest runs all
# tests of one checkpoint before those of the next, whose programs take the place of its own.
SERVED = sorted(
    (served for name in _names() for served in _served(name)), key=lambda served: not served.extends
)
every_checkpoint = pytest.mark.parametrize("served", SERVED, ids=str, scope="module")


def transcripts(turn: int) -> pytest.MarkDecorator:
    """Of three tests, each checkpoint has one by default, in turn, and all when slow ones run.

    What they are about is the engine; a family has its say in all three through its checkpoints.
    """
    return pytest.mark.parametrize(
        "served",
        [
            pytest.param(served, marks=[] if i % 3 == turn else [pytest.mark.slow])
            for i, served in enumerate(s for s in SERVED if s.extends)
        ],
        ids=str,
        scope="module",
    )


def test_every_golden_is_tested() -> None:
    stems = {name.removesuffix(".gguf") for name in _names()}
    assert {path.stem for path in FAMILIES.glob("*.npz")} == stems


def test_every_family_has_a_golden() -> None:
    """Whoever adds a family to the table adds its goldens."""
    configs = [
        json.loads(file.read_text())
        for folder in (FAMILIES, GOLDEN)
        for file in folder.glob("*/config.json")
    ]
    assert {family_of(config).name for config in configs} == {f.name for f in BUILT_IN}


@every_checkpoint
def test_logits_equal_the_reference_in_one_shot_and_in_chunks(served: Served) -> None:
    data, engine = served.golden(), served.engine()
    cases = [(prompt, chunk) for prompt in served.prompts for chunk in (MANY, FEW - 1)]
    hidden = [hidden_of(engine, data[f"{prompt}_token_ids"], chunk) for prompt, chunk in cases]
    # One call, since each compiles.
    ends = np.cumsum([len(h) for h in hidden])
    logits = np.split(head_of(engine, np.concatenate(hidden)), ends[:-1])
    for (prompt, chunk), got in zip(cases, logits, strict=True):
        error = np.abs(got - data[f"{prompt}_logits"]).max()
        assert error <= TOLERANCE, f"{served} {prompt} by {chunk}: {error}"


@transcripts(0)
def test_transcripts_of_requests_alone(served: Served) -> None:
    data = served.golden()
    tokens = run_alone(served.engine(max_num_batched_tokens=MANY), _work(served, data))
    _assert_golden(served, data, tokens)


@transcripts(1)
def test_transcripts_in_chunks_among_strangers_and_from_the_prefix_cache(served: Served) -> None:
    data = served.golden()
    engine = served.engine(max_num_batched_tokens=FEW)
    _assert_golden(served, data, run_tokens(engine, _work(served, data) | _strangers(served, data)))
    hits = engine.stats.prefix_cache_hits
    _assert_golden(served, data, run_tokens(engine, _work(served, data)))
    assert engine.stats.prefix_cache_hits > hits


@transcripts(2)
def test_transcripts_of_interrupted_requests(served: Served) -> None:
    data = served.golden()
    engine = served.engine(max_num_batched_tokens=FEW, page_size=8, num_pages=20)
    _assert_golden(served, data, run_tokens(engine, _work(served, data) | _strangers(served, data)))
    assert engine.stats.num_preemptions > 0


def test_a_model_is_settled_to_the_length_it_serves() -> None:
    _, config, _, _ = loaded("llama_longrope")
    short, long = config.for_length(ORIGINAL_LENGTH), config.for_length(ORIGINAL_LENGTH + 1)
    assert short.ropes[0].scaling.factors == config.ropes[0].scaling.short_factor
    assert long.ropes[0].scaling.factors == config.ropes[0].scaling.long_factor
    assert long.for_length(10) == long


def _work(served: Served, data: Mapping[str, np.ndarray]) -> dict[str, Work]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    return {p: Work(tuple(data[f"{p}_token_ids"].tolist()), params) for p in served.prompts}


def _strangers(served: Served, data: Mapping[str, np.ndarray]) -> dict[str, Work]:
    """Sampled requests with other tokens, of the same lengths."""
    params = SamplingParams(temperature=1, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    return {
        f"stranger to {p}": Work(tuple(data[f"{p}_token_ids"][::-1].tolist()), params, seed=i)
        for i, p in enumerate(served.prompts)
    }


def _assert_golden(
    served: Served, data: Mapping[str, np.ndarray], tokens: Mapping[str, list[int]]
) -> None:
    for prompt in served.prompts:
        assert tokens[prompt] == data[f"{prompt}_greedy"].tolist(), f"{served} {prompt}"
