"""`jaxinfer plan`: what a model takes of each device, told without devices and weights."""

from __future__ import annotations

import json
import math

import pytest
from flax import nnx
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.footprint import abstract_model, num_parameters, one_layer_of_each_kind
from jaxinfer.models import flat_parameters
from jaxinfer.plan_compile import plan_memory
from jaxinfer.planning import MemoryPlan, Topology
from jaxinfer.resolution import resolve, runner_config
from tests.engines import FAMILIES, config_of


def plan(model: str, topology: str, **settings) -> MemoryPlan:
    return plan_memory(EngineConfig(model=model, **settings), topology, compiled=False)


def test_llama_70b_fits_eight_devices_and_not_one() -> None:
    eight, one = plan("llama-3-70b", "h100:8"), plan("llama-3-70b", "h100:1")
    assert eight.num_parameters == one.num_parameters == 70_553_706_496
    assert one.total_weight_bytes == 2 * one.num_parameters
    # Norms are whole on every device; nothing else is.
    assert 0 <= 8 * eight.total_weight_bytes - one.total_weight_bytes < 7 * 2 * 161 * 8192 + 1
    assert eight.fits
    assert not one.fits
    # Two vectors of 128 numbers of one KV head in each of 80 layers, and a token id.
    assert eight.page_bytes == 16 * (2 * 80 * 128 * 2 + 4)
    assert not eight.temporaries.compiled


def test_deepseek_v3_does_not_fit_sixteen_in_bfloat16() -> None:
    """671 billion parameters of two bytes are 84 GB a device, more than an H100 has."""
    found = plan("deepseek-v3", "h100:16", max_model_len=32_768)
    assert round(found.num_parameters / 1e9) == 671
    assert found.expert_parallel == 16
    assert found.weight_bytes["experts"] == 58 * 3 * 256 * 7168 * 2048 * 2 // 16
    assert not found.fits
    assert any("latents" in cost for cost in found.costs)
    assert found.remedies == (
        "16 x rtx_pro_6000",
        "32 x h100",
        "not supported yet: all weights in one byte each, 39.96 GiB a device",
    )
    roomier = plan("deepseek-v3", "h200:16", max_model_len=32_768)
    assert roomier.fits and not roomier.remedies


def test_devices_that_do_not_share_a_layer_are_replicas() -> None:
    found = plan("llama-3-8b", "h100:8", tensor_parallel_size=2)
    assert (found.tensor_parallel_size, found.replicas) == (2, 4)
    with pytest.raises(ConfigError, match="must divide the 8 devices"):
        plan("llama-3-8b", "h100:8", tensor_parallel_size=3)


def test_a_length_that_fits_is_proposed() -> None:
    found = plan("llama-3-8b", "l4:1", kv_cache_memory_bytes=2**29)
    assert not found.fits
    assert found.remedies[0] == "--max-model-len 4080, which the pages hold"
    assert plan("llama-3-8b", "l4:1", kv_cache_memory_bytes=2**29, max_model_len=4080).fits


def test_replicas_have_devices_of_their_own() -> None:
    found = plan("llama-3-8b", "h100:8", data_parallel_size=4)
    assert (found.tensor_parallel_size, found.replicas) == (2, 4)
    for settings in (
        {"data_parallel_size": 3},
        {"data_parallel_size": 4, "tensor_parallel_size": 4},
    ):
        with pytest.raises(ConfigError, match="must divide"):
            plan("llama-3-8b", "h100:8", **settings)


def test_int8_weights_are_counted_where_they_can_be_had() -> None:
    whole, int8 = plan("llama-3-8b", "l4:1"), plan("llama-3-8b", "l4:1", quantization="int8")
    for kind in ("attention", "feed-forward"):
        assert int8.weight_bytes[kind] == pytest.approx(whole.weight_bytes[kind] / 2, rel=0.01)
    with pytest.raises(ConfigError, match="data_parallel_size to 8"):
        plan("llama-3-8b", "h100:8", quantization="int8")


def test_pages_are_those_that_the_engine_takes() -> None:
    """Windows have pages of their own, and whole sequences those of the other layers."""
    for folder in (FAMILIES / "gemma3", FAMILIES / "qwen3"):
        settings = {"dtype": "float32", "kv_cache_memory_bytes": 2**17, "max_model_len": 128}
        found = plan(str(folder), "l4:1", **settings)
        engine = resolve(EngineConfig(**settings), config_of(folder.name))
        shapes = runner_config(engine, config_of(folder.name))
        assert found.windows == shapes.windows
        assert (found.num_pages, found.num_window_pages) == (
            shapes.num_pages,
            shapes.num_window_pages,
        )
        assert found.cache_bytes <= 2**17
    assert not found.windows


@pytest.mark.parametrize("topology", ["h100", "h100:0", "tpu:8", "8"])
def test_an_unknown_topology_is_refused(topology: str) -> None:
    with pytest.raises(ConfigError, match="CHIP:COUNT"):
        Topology.parse(topology)


def test_one_layer_of_each_kind_stands_for_all() -> None:
    reduced, layers = one_layer_of_each_kind(config_of("deepseek_v3"))
    assert layers == {0: 1, 1: config_of("deepseek_v3").num_hidden_layers - 1}
    assert [reduced.is_routed(i) for i in range(2)] == [False, True]


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3", "qwen3_moe_mixed"])
def test_parameters_counted_by_kind_are_all_there_are(name: str) -> None:
    model, _ = abstract_model(config_of(name), "float32")
    parameters = flat_parameters(nnx.state(model)).values()
    assert num_parameters(config_of(name)) == sum(math.prod(p.shape) for p in parameters)


def test_command_prints_a_table_or_json_and_says_whether_it_fits() -> None:
    folder = str(FAMILIES / "mixtral")
    arguments = ["plan", "--model", folder, "--topology", "l4:2", "--estimate"]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0, table.output
    for text in ("2 x l4", "weights: experts", "ESTIMATE", "it fits"):
        assert text in table.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert found["tensor_parallel_size"] == 2
    assert found["total_weight_bytes"] == sum(found["weight_bytes"].values())
    too_large = ["plan", "--model", "llama-3-70b", "--topology", "l4:2", "--estimate"]
    refused = CliRunner().invoke(app, too_large)
    assert refused.exit_code == 1
    assert "it does NOT fit; what would:\n" in refused.output
