"""OLMo 2 and 3 (arXiv:2501.00656): the stream is never normed, only what is added to it.

And OLMoE (arXiv:2409.02060), which norms as Llama does and queries and keys as OLMo 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import ModelError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.hf_config import (
    alternating_windows,
    decoder_config,
    projection_biases,
    require,
    rope_from_hf,
)
from jaxinfer.models.hf_layout import (
    ENDS,
    EXPERTS,
    LLAMA_LIKE,
    PROJECTIONS,
    QK_NORMS,
    layer_norms,
)
from jaxinfer.nn.moe import MoEConfig
from jaxinfer.nn.norm import NormConfig


def olmo2_config(hf: Mapping[str, Any], **version: Any) -> ModelConfig:
    """Translate `Olmo2Config`: queries and keys are normed over all heads together."""
    return decoder_config(
        hf,
        **projection_biases(hf),
        norm=NormConfig(eps=float(hf.get("rms_norm_eps", 1e-5)), scale_in_float32=True),
        pre_norm=False,
        post_norm=True,
        qk_norm="across_heads",
        **version,
    )


def olmo3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `Olmo3Config`: windows in three of four layers, where rope is not stretched."""
    hidden, heads = require(hf, "hidden_size", "num_attention_heads")
    head_dim = hf.get("head_dim") or hidden // heads
    windows = alternating_windows(hf, 4, hf.get("sliding_window", 4096))
    stretched = rope_from_hf(hf, head_dim)
    plain = rope_from_hf(hf, head_dim, settings={"rope_theta": stretched.rope_theta})
    ropes = tuple(stretched if window is None else plain for window in windows)
    return olmo2_config(hf, sliding_windows=windows, ropes=ropes)


def olmoe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `OlmoeConfig`; `intermediate_size` is that of an expert."""
    if hf.get("clip_qkv") is not None:
        raise ModelError(f"clip_qkv={hf['clip_qkv']!r} is not supported")
    (intermediate,) = require(hf, "intermediate_size")
    return decoder_config(
        hf,
        **projection_biases(hf),
        norm=NormConfig(eps=float(hf.get("rms_norm_eps", 1e-5))),
        qk_norm="across_heads",
        moe=MoEConfig(
            num_experts=hf.get("num_experts") or 64,
            num_experts_per_tok=hf.get("num_experts_per_tok") or 8,
            intermediate_size=intermediate,
            norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
        ),
    )


WEIGHTS = (
    *ENDS,
    *PROJECTIONS,
    *QK_NORMS,
    *layer_norms(
        post_attention_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm"
    ),
)

OLMO2 = Family(
    name="OLMo 2",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    config=olmo2_config,
    weights=WEIGHTS,
    examples=("OLMo 2 1B, 7B, 13B, 32B",),
)

OLMO3 = Family(
    name="OLMo 3",
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    config=olmo3_config,
    weights=WEIGHTS,
    examples=("OLMo 3 7B, 32B",),
)

OLMOE = Family(
    name="OLMoE",
    architectures=("OlmoeForCausalLM",),
    model_types=("olmoe",),
    config=olmoe_config,
    weights=(*LLAMA_LIKE, *QK_NORMS, *EXPERTS),
    examples=("OLMoE-1B-7B",),
)
