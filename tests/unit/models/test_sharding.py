"""Which devices share what, and what is said where they cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.models import lay_out_heads
from jaxinfer.sharding import (
    MESH_AXES,
    check_experts,
    costs,
    divided,
    make_mesh,
    page_sharding,
    query_axes,
    vocab_shards,
)
from tests.engines import config_of


def mesh(tensor: int, expert: int = 1) -> Any:
    return jax.sharding.AbstractMesh((1, expert, tensor // expert), MESH_AXES)


def test_what_does_not_divide_is_whole_on_every_device() -> None:
    assert divided(mesh(4), (96, 2, 64), ("embed", None, "mlp")).shard_shape((96, 2, 64))[2] == 16
    assert divided(mesh(4), (96, 2, 66), ("embed", None, "mlp")).shard_shape((96, 2, 66))[2] == 66
    assert vocab_shards(mesh(4), 320).count == 4
    assert vocab_shards(mesh(4), 50_257) is None
    assert vocab_shards(mesh(1), 320) is None


def test_experts_go_to_one_axis_and_all_else_to_both() -> None:
    kernels = divided(mesh(8, 4), (16, 32, 8), ("experts", "embed", "expert_mlp"))
    assert kernels.shard_shape((16, 32, 8)) == (4, 32, 4)
    assert divided(mesh(8, 4), (32, 64), ("embed", "mlp")).shard_shape((32, 64)) == (32, 8)


def test_queries_stay_with_their_keys() -> None:
    """Three KV heads that were not laid out stay whole, and their nine queries with them."""
    plain, laid_out = config_of("smollm2"), lay_out_heads(config_of("smollm2"), 3)
    assert query_axes(mesh(2), plain) is None
    assert query_axes(mesh(3), laid_out) == ("expert", "tensor")
    latent = lay_out_heads(config_of("deepseek_v3"), 4)
    assert query_axes(mesh(4), latent) == ("expert", "tensor")
    assert page_sharding(mesh(4), 1).spec[1] is None


def test_costs_name_every_size_that_is_odd() -> None:
    config = dataclasses.replace(config_of("smollm2"), vocab_size=321)
    text = " ".join(costs(lay_out_heads(config, 4), mesh(4)))
    assert "9 query and 3 KV heads became 12 and 4" in text
    assert "33%" in text
    assert "vocab_size (321)" in text
    assert costs(lay_out_heads(config_of("llama3"), 2), mesh(2)) == []
    assert costs(config_of("smollm2"), mesh(1)) == []


def test_experts_that_cannot_be_divided_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the model has no experts"):
        check_experts(config_of("llama3"), 2, 2)
    with pytest.raises(ConfigError, match="must divide the 8 experts"):
        check_experts(config_of("mixtral"), 3, 3)
    with pytest.raises(ConfigError, match=r"expert_parallel \(3\) must divide"):
        check_experts(config_of("mixtral"), 4, 3)


def test_more_devices_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="this process sees 1"):
        make_mesh(64)
