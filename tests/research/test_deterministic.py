"""One request's logits, bit by bit, whatever happens around it and to it."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from jaxinfer import SamplingParams, functional
from jaxinfer.nn import MoE
from tests.engines import make_engine
from tests.research.models import golden, llm_of, prompt_of, tokens

SETTINGS = {"deterministic": True, "buckets": (), "page_size": 8}
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, detokenize=False)


def strangers(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(3, 300, size=n).tolist() for n in rng.integers(2, 50, size=count)]


def logits_in(llm, ids, others, params=PARAMS):
    """Return the logits and tokens of `ids`, in the middle of others."""
    half = len(others) // 2
    prompts = [*others[:half], ids, *others[half:]]
    output = llm.generate(prompts, params, capture="logits")[half]
    return output.captures["logits"], output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("llama3", "auto"),
        pytest.param("llama3", "xla", marks=pytest.mark.slow),
        pytest.param("mixtral", "xla", marks=pytest.mark.slow),
        pytest.param("gemma2", "xla", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "xla", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "xla", marks=pytest.mark.slow),
        pytest.param("olmoe", "auto", marks=pytest.mark.slow),
    ],
)
def test_logits_are_bitwise_those_of_the_request_alone(name, kernels):
    """In batches of all sizes, which cut its prompt anywhere, and from a prefix cache."""
    ids = prompt_of(name, "long")
    with llm_of(name, kernels=kernels, num_pages=256, **SETTINGS) as llm:
        alone, ids_alone = logits_in(llm, ids, [])
        n = len(ids)
        np.testing.assert_allclose(alone[:n], golden(name, "long_logits"), atol=5e-4)
        for count in (1, 5, 20):
            logits, ids_among = logits_in(llm, ids, strangers(count))
            assert ids_among == ids_alone
            np.testing.assert_array_equal(logits, alone)
        # Captures compute a prompt again; logprobs of sampled tokens tell of cached pages.
        params = SamplingParams(
            temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=5
        )
        cold, warm = (llm.generate([ids], params)[0] for _ in range(2))
        assert warm.num_cached_tokens
        assert cold.outputs[0].logprobs == warm.outputs[0].logprobs
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
        first, _ = logits_in(llm, ids, [], greedy)
        second, _ = logits_in(llm, ids, strangers(7), greedy)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first[:n], alone[:n])


def test_logits_are_bitwise_the_same_after_preemption():
    ids = prompt_of("llama3", "long")
    params = SamplingParams(
        temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, detokenize=False
    )
    with llm_of("llama3", num_pages=256, **SETTINGS) as roomy:
        alone, ids_alone = logits_in(roomy, ids, [], params)
    # Of 89 tokens each, where there is room for 160.
    with llm_of("llama3", num_pages=20, **SETTINGS) as narrow:
        rivals = [[t + 1 for t in ids], [t + 2 for t in ids]]
        outputs = narrow.generate([rivals[0], ids, rivals[1]], params, capture="logits")
        assert narrow.stats.num_preemptions
    assert tokens(outputs)[1] == ids_alone
    np.testing.assert_array_equal(outputs[1].captures["logits"], alone)


@pytest.mark.slow
def test_without_the_setting_logits_do_depend_on_neighbours():
    """Else the tests above would prove nothing."""
    ids = prompt_of("llama3", "long")
    with llm_of("llama3", (4, 32), num_pages=256, max_num_seqs=32, kernels="xla") as llm:
        alone, _ = logits_in(llm, ids, [])
        among, _ = logits_in(llm, ids, strangers(20))
    assert np.abs(among - alone).max() < 1e-3
    assert (among != alone).any()


def test_training_and_serving_agree_bit_by_bit():
    """The log-probabilities that a request reported, from the parameters alone."""
    ids = prompt_of("llama3")
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=10, logprobs=0, ignore_eos=True, detokenize=False
    )
    with llm_of("llama3", num_pages=256, kernels="xla", **SETTINGS) as llm:
        f = functional(llm)
        outputs = llm.generate([*strangers(4), ids], params, capture="logits")
        sample = outputs[-1].outputs[0]
        replayed = f.as_served(f.params, [*ids, *sample.token_ids[:-1]])
        doubled = {path: x * 1.01 for path, x in f.params.items()}
        other = f.as_served(doubled, ids)
    np.testing.assert_array_equal(replayed, sample.captures["logits"])
    assert np.abs(other - replayed[: len(ids)]).max() > 1e-3
    reported = [e[t].logprob for t, e in zip(sample.token_ids, sample.logprobs, strict=True)]
    last = replayed[len(ids) - 1 :].astype(np.float64)
    exact = last - np.log(np.exp(last - last.max(-1, keepdims=True)).sum(-1, keepdims=True))
    exact -= last.max(-1, keepdims=True)
    np.testing.assert_allclose(
        reported, exact[np.arange(len(last)), sample.token_ids], rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_all_experts_of_a_deterministic_engine_are_steady(deterministic):
    """Whatever the machine: XLA:CPU sums groups of all sizes alike, so tokens cannot tell."""
    engine = make_engine("mixtral", kernels="xla", deterministic=deterministic)
    backbone = engine.runner.programs.backbone
    experts = [m for _, m in nnx.iter_modules(backbone(backbone.abstract)) if isinstance(m, MoE)]
    assert len(experts) == 2
    assert all(moe.steady is deterministic for moe in experts)
