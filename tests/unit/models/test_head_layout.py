"""Heads that devices cannot share evenly: what becomes of them, and that it changes no result."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxinfer.models import lay_out_heads, relayout
from tests.engines import config_of


@pytest.mark.parametrize(
    ("heads", "devices", "laid_out"),
    [
        ((32, 8), 8, (32, 8)),  # nothing to do
        ((9, 3), 2, (12, 4)),
        ((9, 3), 4, (12, 4)),
        ((9, 3), 8, (24, 8)),
        ((64, 8), 16, (64, 16)),  # each KV head twice, for half of the queries
        ((4, 1), 2, (4, 2)),
        ((14, 2), 4, (28, 4)),  # 7 queries a head cannot be halved
        ((24, 8), 16, (48, 16)),
    ],
)
def test_layout_follows_the_rule(heads, devices, laid_out) -> None:
    config = dataclasses.replace(
        config_of("llama3"), num_attention_heads=heads[0], num_key_value_heads=heads[1]
    )
    made = lay_out_heads(config, devices)
    assert (made.num_attention_heads, made.num_key_value_heads) == laid_out
    assert made.as_stored() == config
    assert lay_out_heads(made, 1) == config
    assert (made.stored_heads is None) == (laid_out == heads)


def test_a_norm_across_heads_is_never_padded() -> None:
    config = dataclasses.replace(
        config_of("olmo2"), num_attention_heads=9, num_key_value_heads=3, stored_heads=None
    )
    assert config.qk_norm == "across_heads"
    assert lay_out_heads(config, 2) == config
    # Repeated heads do not change a mean.
    assert lay_out_heads(config, 9).num_key_value_heads == 9


def test_latent_heads_are_padded_behind_the_one_that_all_share() -> None:
    config = lay_out_heads(config_of("deepseek_v3"), 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 1)


def test_every_query_keeps_its_key_and_value() -> None:
    """8 queries behind 2 KV heads on 4 devices: 2 behind each of 4."""
    config = lay_out_heads(config_of("llama3"), 4)
    G, H, D = 4, 2, 3
    kernel = np.random.default_rng(0).normal(size=(D, 2, G + 2, H))
    made = relayout(config, "layers.0.attention.qkv.kernel", kernel)
    assert made.shape == (D, 4, 4, H)
    for head in range(8):
        q, k = kernel[:, head // 4, head % 4], kernel[:, head // 4, 4]
        np.testing.assert_array_equal(made[:, head // 2, head % 2], q)
        np.testing.assert_array_equal(made[:, head // 2, 2], k)


def test_parameters_without_heads_stay_the_same_object() -> None:
    config = lay_out_heads(config_of("smollm2"), 4)
    values = np.ones((3, 2, 4))
    assert relayout(config, "layers.0.mlp.gate_up.kernel", values) is values
    assert relayout(config, "layers.0.attention.q_norm.scale", values[0, 0]).shape == (4,)
