"""`jaxinfer plan`: what a model takes of each device, told without devices and weights."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.plan_compile import one_layer_of_each_kind, plan_memory
from jaxinfer.planning import MemoryPlan, Topology
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
    assert plan("deepseek-v3", "b200:16", max_model_len=32_768).fits


def test_devices_that_do_not_share_a_layer_are_replicas() -> None:
    found = plan("llama-3-8b", "h100:8", tensor_parallel_size=2)
    assert (found.tensor_parallel_size, found.replicas) == (2, 4)
    with pytest.raises(ConfigError, match="must divide the 8 devices"):
        plan("llama-3-8b", "h100:8", tensor_parallel_size=3)


@pytest.mark.parametrize("topology", ["h100", "h100:0", "tpu:8", "8"])
def test_an_unknown_topology_is_refused(topology: str) -> None:
    with pytest.raises(ConfigError, match="CHIP:COUNT"):
        Topology.parse(topology)


def test_one_layer_of_each_kind_stands_for_all() -> None:
    reduced, layers = one_layer_of_each_kind(config_of("deepseek_v3"))
    assert layers == [0, 1]
    assert [reduced.is_routed(i) for i in range(2)] == [False, True]


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
    assert CliRunner().invoke(app, too_large).exit_code == 1
