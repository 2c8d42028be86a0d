"""Gemma 1, 2 and 3, text (arXiv:2403.08295, 2408.00118, 2503.19786).

All scale by 1 + weight, multiply the embedding by the root of its width, and tie the head to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import (
    alternating_windows,
    decoder_config,
    projection_biases,
    require,
    rope_from_hf,
)
from jaxinfer.models.hf_layout import ENDS, LLAMA_LIKE, PROJECTIONS, QK_NORMS, layer_norms
from jaxinfer.nn.norm import NormConfig


def gemma_config(hf: Mapping[str, Any], **version: Any) -> ModelConfig:
    """Translate `GemmaConfig`, or what all versions share."""
    return decoder_config(
        hf,
        **projection_biases(hf),
        # The first release's "gelu" was never meant: Gemma is trained with the approximation.
        hidden_act=_activation(hf),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
        norm=NormConfig(eps=float(hf.get("rms_norm_eps", 1e-6)), offset=1.0, scale_in_float32=True),
        embedding_multiplier=require(hf, "hidden_size")[0] ** 0.5,
        **{"head_dim": hf.get("head_dim") or 256} | version,
    )


def gemma2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `Gemma2Config`: norms on both sides, soft-caps, every other layer a window."""
    return gemma_config(
        hf,
        post_norm=True,
        attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=_optional_float(hf.get("attn_logit_softcapping", 50.0)),
        logit_softcap=_optional_float(hf.get("final_logit_softcapping", 30.0)),
        sliding_windows=alternating_windows(hf, 2, hf.get("sliding_window", 4096)),
    )


def gemma3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `Gemma3TextConfig`: layers with a window have a rope of their own."""
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    windows = alternating_windows(hf, pattern, hf.get("sliding_window", 4096))
    head_dim = hf.get("head_dim") or 256
    nested = hf.get("rope_parameters") or {}
    everywhere = rope_from_hf(
        hf, head_dim, settings=nested.get("full_attention"), rope_theta=1_000_000.0
    )
    local = nested.get("sliding_attention") or {
        "rope_theta": hf.get("rope_local_base_freq", 10000.0)
    }
    nearby = rope_from_hf(hf, head_dim, settings=local)
    return gemma_config(
        hf,
        post_norm=True,
        qk_norm="shared",
        attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=_optional_float(hf.get("final_logit_softcapping")),
        sliding_windows=windows,
        ropes=tuple(everywhere if window is None else nearby for window in windows),
    )


def _activation(hf: Mapping[str, Any]) -> str:
    named = hf.get("hidden_activation") or hf.get("hidden_act") or "gelu"
    return "gelu_pytorch_tanh" if named == "gelu" else named


def _optional_float(value: float | int | None) -> float | None:
    return None if value is None else float(value)


_SANDWICH = (
    *ENDS,
    *PROJECTIONS,
    *layer_norms(
        input_norm="input_layernorm",
        post_attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
    ),
)

GEMMA = Family(
    name="Gemma",
    architectures=("GemmaForCausalLM",),
    model_types=("gemma",),
    config=gemma_config,
    weights=LLAMA_LIKE,
    examples=("Gemma 2B, 7B", "CodeGemma"),
)

GEMMA2 = Family(
    name="Gemma 2",
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    config=gemma2_config,
    weights=_SANDWICH,
    examples=("Gemma 2 2B, 9B, 27B",),
)

GEMMA3 = Family(
    name="Gemma 3",
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    config=gemma3_config,
    weights=(*_SANDWICH, *QK_NORMS),
    examples=("Gemma 3 270M, 1B",),
)
