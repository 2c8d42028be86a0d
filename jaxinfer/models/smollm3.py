"""SmolLM3: Llama, with every fourth layer free of positions (arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import (
    decoder_config,
    projection_biases,
    require,
    rope_from_hf,
    windows_from_layer_types,
)
from jaxinfer.models.hf_layout import LLAMA_LIKE


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `SmolLM3Config`; in `no_rope_layers`, 1 stands for a layer with rope."""
    layers, hidden, heads = require(hf, "num_hidden_layers", "hidden_size", "num_attention_heads")
    interval = hf.get("no_rope_layer_interval", 4)
    rotated = hf.get("no_rope_layers") or [(i + 1) % interval > 0 for i in range(layers)]
    rope = rope_from_hf(hf, hf.get("head_dim") or hidden // heads, rope_theta=2_000_000.0)
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    default = ("sliding_attention" if window and not flag else "full_attention" for flag in rotated)
    return decoder_config(
        hf,
        **projection_biases(hf),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
        ropes=tuple(rope if flag else None for flag in rotated),
        sliding_windows=windows_from_layer_types(hf.get("layer_types") or default, window),
    )


SMOLLM3 = Family(
    name="SmolLM3",
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    config=config_from_hf,
    weights=LLAMA_LIKE,
    examples=("SmolLM3 3B",),
)
