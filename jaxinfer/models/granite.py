"""Granite 3 (github.com/ibm-granite): Llama, with four multipliers (arXiv:2203.03466)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, projection_biases
from jaxinfer.models.hf_layout import LLAMA_LIKE


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `GraniteConfig`; `logits_scaling` divides."""
    return decoder_config(
        hf,
        **projection_biases(hf),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        attention_scale=float(hf.get("attention_multiplier", 1.0)),
        embedding_multiplier=float(hf.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(hf.get("residual_multiplier", 1.0)),
        logit_multiplier=1 / hf.get("logits_scaling", 1.0),
    )


GRANITE = Family(
    name="Granite",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    config=config_from_hf,
    weights=LLAMA_LIKE,
    examples=("Granite 3.0 to 3.3, 2B and 8B",),
)
