"""GPT-OSS (arXiv:2508.10925): attention sinks, clamped SwiGLU, experts in MXFP4 or as matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family, Join, Weight, projection
from jaxinfer.models.hf_config import (
    alternating_windows,
    decoder_config,
    expect,
    projection_biases,
    require,
)
from jaxinfer.models.hf_layout import ENDS, OUTPUT, PRE_NORMS, QKV
from jaxinfer.nn.moe import MoEConfig


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `GptOssConfig`; its one quantization, of experts, is undone on loading."""
    num_experts, visited, intermediate = require(
        hf, "num_local_experts", "num_experts_per_tok", "intermediate_size"
    )
    quantization = hf.get("quantization_config")
    if quantization:
        expect({"quant_method": quantization.get("quant_method", "unknown")}, quant_method="mxfp4")
    return decoder_config(
        {**hf, "quantization_config": None},
        **projection_biases(hf),
        attention_sinks=True,
        sliding_windows=alternating_windows(hf, 2, hf.get("sliding_window", 128)),
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=visited,
            intermediate_size=intermediate,
            router_bias=True,
            expert_bias=True,
            swiglu_limit=float(hf.get("swiglu_limit", 7.0)),
            stored_as="mxfp4" if quantization else "matrices",
        ),
    )


def _decoded(xp: ModuleType, parts: Sequence[Any]) -> Any:
    """Blocks [E, out, in / 32, 16] of two E2M1 codes a byte, and E8M0 scales: [E, out, in]."""
    blocks, scales = parts
    codes = blocks.astype(np.uint8)
    low_high = xp.stack([codes & 15, codes >> 4], axis=-1)
    magnitudes = xp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], blocks.dtype)
    values = xp.concatenate([magnitudes, -magnitudes])[low_high]
    # Powers of two and three bits of mantissa: exact in bfloat16.
    powers = xp.exp2(scales.astype(np.float32) - 127).astype(blocks.dtype)
    E, out, *_ = blocks.shape
    return (values * powers[..., None, None]).reshape(E, out, -1)


def _columns(part: slice) -> Join:
    """Some columns of [E, in, out], whichever way it is stored."""

    def join(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
        whole = parts[0] if len(parts) == 1 else xp.moveaxis(_decoded(xp, parts), 1, 2)
        return whole[..., part]

    return join


# Gate and up stand in turns.
_GATE, _UP, _ALL = slice(0, None, 2), slice(1, None, 2), slice(None)


def _is_mxfp4(config: ModelConfig) -> bool:
    return config.moe is not None and config.moe.stored_as == "mxfp4"


_LAYER = "model.layers.{i}."
_EXPERTS = _LAYER + "mlp.experts."


def _expert_weights(target: str, name: str, part: slice) -> tuple[Weight, ...]:
    target, name, join = f"layers.{{i}}.mlp.{target}", _EXPERTS + name, _columns(part)
    packed = (f"{name}_blocks", f"{name}_scales")
    return (
        Weight(target, packed, join, when=_is_mxfp4, packed=True),
        Weight(target, (name,), join, when=lambda c: not _is_mxfp4(c)),
        Weight(f"{target}_bias", (f"{name}_bias",), join),
    )


GPT_OSS = Family(
    name="GPT-OSS",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    config=config_from_hf,
    weights=(
        *ENDS,
        *QKV,
        *OUTPUT,
        *PRE_NORMS,
        Weight("layers.{i}.attention.sinks", (_LAYER + "self_attn.sinks",)),
        *projection("layers.{i}.mlp.router", _LAYER + "mlp.router", bias=lambda _: True),
        *_expert_weights("gate", "gate_up_proj", _GATE),
        *_expert_weights("up", "gate_up_proj", _UP),
        *_expert_weights("down", "down_proj", _ALL),
    ),
    examples=("gpt-oss-20b", "gpt-oss-120b"),
)
