"""Llama 2 to 3.x, SmolLM2, TinyLlama, Yi (arXiv:2307.09288, 2407.21783); Mistral (2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import decoder_config, projection_biases, require
from jaxinfer.models.hf_layout import LLAMA_LIKE


def llama_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `LlamaConfig`. It may carry a window, which the reference ignores too."""
    return decoder_config(hf, **projection_biases(hf), mlp_bias=bool(hf.get("mlp_bias", False)))


def mistral_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `MistralConfig`."""
    (layers,) = require(hf, "num_hidden_layers")
    return decoder_config(hf, sliding_windows=(hf.get("sliding_window"),) * layers)


LLAMA = Family(
    name="Llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    config=llama_config,
    weights=LLAMA_LIKE,
    examples=("Llama 2, 3, 3.1, 3.2, 3.3", "SmolLM2", "TinyLlama", "Yi"),
)

MISTRAL = Family(
    name="Mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    config=mistral_config,
    weights=LLAMA_LIKE,
    examples=("Mistral 7B v0.1 to v0.3",),
)
