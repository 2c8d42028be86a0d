"""Command R, R+, Aya (Cohere); Command R7B, Command A (Cohere 2).

One norm per block, which attention and feed-forward both read; rope in GPT-J's pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import (
    alternating_windows,
    decoder_config,
    expect,
    projection_biases,
    require,
    rope_from_hf,
)
from jaxinfer.models.hf_layout import ENDS, PROJECTIONS, QK_NORMS, layer_norms
from jaxinfer.nn.norm import NormConfig
from jaxinfer.nn.rope_scaling import RopeConfig


def cohere_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `CohereConfig`."""
    return _config(
        hf,
        ropes=(_rope(hf),) * require(hf, "num_hidden_layers")[0],
        qk_norm="per_head" if hf.get("use_qk_norm") else None,
    )


def cohere2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `Cohere2Config`: layers that see everything have no positions."""
    expect(
        hf,
        use_qk_norm=False,
        use_parallel_block=True,
        use_gated_activation=True,
        position_embedding_type="rope_gptj",
        order_of_interleaved_layers="local_attn_first",
        rotary_pct=1.0,
    )
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 4
    windows = alternating_windows(hf, pattern, hf.get("sliding_window", 4096))
    rope = _rope(hf)
    return _config(
        hf,
        sliding_windows=windows,
        ropes=tuple(None if window is None else rope for window in windows),
    )


def _config(hf: Mapping[str, Any], **version: Any) -> ModelConfig:
    return decoder_config(
        hf,
        **projection_biases(hf),
        norm=NormConfig(
            eps=float(hf.get("layer_norm_eps", 1e-5)), center=True, scale_in_float32=True
        ),
        parallel_block=True,
        shared_norm=True,
        logit_multiplier=float(hf.get("logit_scale", 0.0625)),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
        **version,
    )


def _rope(hf: Mapping[str, Any]) -> RopeConfig:
    hidden, heads = require(hf, "hidden_size", "num_attention_heads")
    return rope_from_hf(hf, hf.get("head_dim") or hidden // heads, interleaved=True)


WEIGHTS = (*ENDS, *PROJECTIONS, *layer_norms(input_norm="input_layernorm"))

COHERE = Family(
    name="Cohere",
    architectures=("CohereForCausalLM",),
    model_types=("cohere",),
    config=cohere_config,
    weights=(*WEIGHTS, *QK_NORMS),
    examples=("Command R", "Command R+", "Aya 23", "Aya Expanse"),
)

COHERE2 = Family(
    name="Cohere 2",
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    config=cohere2_config,
    weights=WEIGHTS,
    examples=("Command R7B", "Command A"),
)
