"""Phi-3, Phi-3.5, Phi-4 (arXiv:2404.14219, 2412.08905, 2503.01743): Llama, with fused tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family, projection, split_heads
from jaxinfer.models.hf_config import decoder_config, expect, require
from jaxinfer.models.hf_layout import DOWN, ENDS, FUSED_GATE_UP, OUTPUT, PRE_NORMS


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `Phi3Config`; `partial_rotary_factor` and LongRoPE are read as everywhere."""
    expect(hf, attention_bias=False, mlp_bias=False, lm_head_bias=False)
    (layers,) = require(hf, "num_hidden_layers")
    scaling = hf.get("rope_scaling") or {}
    if scaling.get("type") == "yarn":
        # The first releases' word for LongRoPE.
        hf = {**hf, "rope_scaling": {**scaling, "type": "longrope"}}
    return decoder_config(hf, sliding_windows=(hf.get("sliding_window"),) * layers)


PHI3 = Family(
    name="Phi-3",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    config=config_from_hf,
    weights=(
        *ENDS,
        *projection(
            "layers.{i}.attention.qkv", "model.layers.{i}.self_attn.qkv_proj", join=split_heads
        ),
        *OUTPUT,
        *FUSED_GATE_UP,
        *DOWN,
        *PRE_NORMS,
    ),
    examples=("Phi-3 mini, medium", "Phi-3.5 mini", "Phi-4", "Phi-4-mini"),
)
