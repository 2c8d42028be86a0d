"""Qwen2 and Qwen2.5 (arXiv:2407.10671); Qwen3 (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import (
    decoder_config,
    projection_biases,
    require,
    windows_from_layer_types,
)
from jaxinfer.models.hf_layout import EXPERTS, LLAMA_LIKE, QK_NORMS
from jaxinfer.nn.moe import MoEConfig


def qwen2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `Qwen2Config`: biases for queries, keys and values only."""
    return decoder_config(hf, sliding_windows=_windows(hf), attention_bias=True)


def qwen3_config(hf: Mapping[str, Any], **version: Any) -> ModelConfig:
    """Translate `Qwen3Config`: each query and key head is normed."""
    return decoder_config(
        hf,
        **projection_biases(hf),
        head_dim=hf.get("head_dim", 128),
        qk_norm="shared",
        **{"sliding_windows": _windows(hf)} | version,
    )


def qwen3_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `Qwen3MoeConfig`: Qwen3, and in every `decoder_sparse_step`-th layer experts.

    A window holds in every layer, whatever `max_window_layers` says: the reference reads it so.
    """
    layers, num_experts, visited, intermediate = require(
        hf, "num_hidden_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size"
    )
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return qwen3_config(
        hf,
        sliding_windows=(hf.get("sliding_window") if hf.get("use_sliding_window") else None,)
        * layers,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=visited,
            intermediate_size=intermediate,
            norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
        ),
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _windows(hf: Mapping[str, Any]) -> tuple:
    """The layers from `max_window_layers` on look back a window, if windows are used at all."""
    (layers,) = require(hf, "num_hidden_layers")
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    default = (
        "sliding_attention" if window and i >= first else "full_attention" for i in range(layers)
    )
    return windows_from_layer_types(hf.get("layer_types") or default, window)


QWEN2 = Family(
    name="Qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    config=qwen2_config,
    weights=LLAMA_LIKE,
    examples=("Qwen2", "Qwen2.5", "QwQ-32B", "DeepSeek-R1-Distill-Qwen"),
)

QWEN3 = Family(
    name="Qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    config=qwen3_config,
    weights=(*LLAMA_LIKE, *QK_NORMS),
    examples=("Qwen3 0.6B to 32B",),
)

QWEN3_MOE = Family(
    name="Qwen3-MoE",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    config=qwen3_moe_config,
    weights=(*LLAMA_LIKE, *QK_NORMS, *EXPERTS),
    examples=("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder"),
)
