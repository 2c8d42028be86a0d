"""Mixtral (arXiv:2401.04088): Mistral, where a token visits two of eight feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family, experts, projection
from jaxinfer.models.hf_config import decoder_config, require
from jaxinfer.models.hf_layout import ENDS, OUTPUT, PRE_NORMS, QKV
from jaxinfer.nn.moe import MoEConfig


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `MixtralConfig`."""
    layers, intermediate, num_experts, visited = require(
        hf, "num_hidden_layers", "intermediate_size", "num_local_experts", "num_experts_per_tok"
    )
    return decoder_config(
        hf,
        sliding_windows=(hf.get("sliding_window"),) * layers,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=visited,
            intermediate_size=intermediate,
        ),
    )


_MOE = "model.layers.{i}.block_sparse_moe."

MIXTRAL = Family(
    name="Mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    config=config_from_hf,
    weights=(
        *ENDS,
        *QKV,
        *OUTPUT,
        *PRE_NORMS,
        *projection("layers.{i}.mlp.router", _MOE + "gate"),
        *experts(_MOE + "experts.{expert}.", gate="w1", up="w3", down="w2"),
    ),
    examples=("Mixtral 8x7B, 8x22B",),
)
