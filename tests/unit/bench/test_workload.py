"""Workloads and their cost: the same each time, and counted as by hand."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from flax import nnx

from jaxinfer.bench.cost import ModelCost
from jaxinfer.bench.workload import Workload, percentile, poisson_arrivals
from jaxinfer.config import EngineConfig
from jaxinfer.model_source import abstract_model
from jaxinfer.models import flat_parameters
from jaxinfer.resolution import resolve
from tests.engines import SMALL, config_of


def test_equal_seeds_ask_for_the_same_and_others_do_not():
    work = Workload(num_requests=3, prompt_tokens=5, new_tokens=1)
    assert work.prompts() == Workload(**work.__dict__).prompts()
    assert work.prompts() != Workload(**{**work.__dict__, "seed": 1}).prompts()


def test_prompts_share_their_prefix_and_nothing_else():
    prompts = Workload(num_requests=4, prompt_tokens=40, new_tokens=1, shared_tokens=30).prompts()
    assert len({tuple(p[:30]) for p in prompts}) == 1
    assert len({tuple(p[30:]) for p in prompts}) == 4
    assert {len(p) for p in prompts} == {40}


@pytest.mark.parametrize("vocab_size", [2, 97, 50_000])
def test_prompts_stay_inside_the_vocabulary(vocab_size):
    work = Workload(num_requests=20, prompt_tokens=20, new_tokens=1)
    tokens = list(itertools.chain(*work.prompts(vocab_size)))
    assert 0 <= min(tokens) <= max(tokens) < vocab_size


@pytest.mark.parametrize(
    "wrong", [{"num_requests": 0}, {"new_tokens": 0}, {"shared_tokens": 6}, {"shared_tokens": -1}]
)
def test_impossible_workloads_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Workload(**{"num_requests": 1, "prompt_tokens": 5, "new_tokens": 1, **wrong})


def test_poisson_arrivals_have_their_rate_and_their_spread():
    arrivals = poisson_arrivals(4000, rate=8.0)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0 and min(gaps) >= 0
    # An exponential's mean is its deviation; 4,000 of them are within 5 % of it.
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert poisson_arrivals(3, rate=float("inf")) == [0, 0, 0]


def test_percentiles_are_numpys():
    values = np.random.default_rng(0).normal(size=101).tolist()
    for p in (0, 50, 90, 99, 100):
        assert percentile(values, p) == pytest.approx(np.percentile(values, p))


def cost_of(name: str, **settings) -> ModelCost:
    model_config = config_of(name)
    config = resolve(EngineConfig(**{**SMALL, "kernels": "xla", **settings}), model_config)
    return ModelCost.of(model_config, config)


@pytest.mark.parametrize("name", ["llama3", "smollm2", "mixtral"])
def test_every_matrix_is_counted_once(name):
    cost, model_config = cost_of(name), config_of(name)
    parameters = flat_parameters(nnx.state(abstract_model(model_config, "float32")[0]))
    matrices = sum(p.size for p in parameters.values() if len(p.shape) > 1)
    counted = cost.body_weights + cost.head_weights + cost.expert_weights
    looked_up = 0 if model_config.tie_word_embeddings else cost.head_weights
    assert counted + looked_up == matrices
    assert bool(cost.expert_weights) == (model_config.moe is not None)


@pytest.mark.parametrize("name", ["smollm2", "mistral"])  # without and with windows
def test_attention_costs_what_its_pairs_cost(name):
    cost, config = cost_of(name), config_of(name)
    n = 40
    pairs = sum(
        min(position + 1, config.window_of(layer) or n)
        for layer in range(config.num_hidden_layers)
        for position in range(n)
    )
    attention = cost.prefill_flops(n) - 2 * (n * cost.body_weights + cost.head_weights)
    assert attention == 4 * config.num_attention_heads * config.head_dim * pairs
    # A prompt's tokens cost what they cost one by one, but for the head.
    one_by_one = sum(cost.decode_flops(context) for context in range(n))
    assert one_by_one - 2 * (n - 1) * cost.head_weights == cost.prefill_flops(n)


def test_a_batch_reads_the_weights_once_and_each_rows_keys():
    cost = cost_of("smollm2")
    alone, four = cost.decode_bytes(1, 100), cost.decode_bytes(4, 100)
    weights = cost.decode_bytes(1, 0)
    assert four - weights == pytest.approx(4 * (alone - weights))
    assert cost_of("smollm2", quantization="int8").decode_bytes(1, 0) == pytest.approx(weights / 4)
