"""GLM-4-0414 (arXiv:2406.12793): norms on both sides; half of each head rotates, interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, require, rope_from_hf
from jaxinfer.models.hf_layout import DOWN, ENDS, FUSED_GATE_UP, OUTPUT, QKV, layer_norms


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `Glm4Config`; its `attention_bias` leaves the output projection without."""
    layers, hidden, heads = require(hf, "num_hidden_layers", "hidden_size", "num_attention_heads")
    rope = rope_from_hf(
        hf,
        hf.get("head_dim") or hidden // heads,
        partial_rotary_factor=0.5,
        interleaved=True,
    )
    return decoder_config(
        hf,
        attention_bias=bool(hf.get("attention_bias", False)),
        post_norm=True,
        ropes=(rope,) * layers,
    )


GLM4 = Family(
    name="GLM-4",
    architectures=("Glm4ForCausalLM",),
    model_types=("glm4",),
    config=config_from_hf,
    weights=(
        *ENDS,
        *QKV,
        *OUTPUT,
        *FUSED_GATE_UP,
        *DOWN,
        *layer_norms(
            input_norm="input_layernorm",
            post_attention_norm="post_self_attn_layernorm",
            mlp_norm="post_attention_layernorm",
            post_mlp_norm="post_mlp_layernorm",
        ),
    ),
    examples=("GLM-4-9B-0414", "GLM-4-32B-0414"),
)
