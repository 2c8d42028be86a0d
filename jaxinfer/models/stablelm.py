"""StableLM 3B, StableLM 2, StableCode (arXiv:2402.17834): Llama, with LayerNorm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family, Weight, norm, stack
from jaxinfer.models.hf_config import decoder_config, require, rope_from_hf
from jaxinfer.models.hf_layout import ENDS, PROJECTIONS, layer_norms
from jaxinfer.nn.norm import NormConfig


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `StableLmConfig`; the parallel block has one norm."""
    layers, hidden, heads = require(hf, "num_hidden_layers", "hidden_size", "num_attention_heads")
    rope = rope_from_hf(hf, hidden // heads, partial_rotary_factor=0.25)
    parallel = bool(hf.get("use_parallel_residual", False))
    return decoder_config(
        hf,
        attention_bias=bool(hf.get("use_qkv_bias", False)),
        norm=NormConfig(
            eps=float(hf.get("layer_norm_eps", 1e-5)),
            center=True,
            bias=True,
            scale_in_float32=True,
        ),
        parallel_block=parallel,
        shared_norm=parallel,
        qk_norm="per_head" if hf.get("qk_layernorm") else None,
        ropes=(rope,) * layers,
    )


STABLELM = Family(
    name="StableLM",
    architectures=("StableLmForCausalLM",),
    model_types=("stablelm",),
    config=config_from_hf,
    weights=(
        *ENDS,
        *PROJECTIONS,
        *layer_norms(input_norm="input_layernorm"),
        *norm(
            "layers.{i}.mlp_norm",
            "model.layers.{i}.post_attention_layernorm",
            when=lambda c: not c.shared_norm,
        ),
        *(
            Weight(
                f"layers.{{i}}.attention.{x}_norm.scale",
                (f"model.layers.{{i}}.self_attn.{x}_layernorm.norms.{head}.weight",),
                stack,
                when=lambda c: c.qk_norm is not None,
            )
            for x, head in (("q", "{head}"), ("k", "{kv_head}"))
        ),
    ),
    examples=("StableLM 3B 4E1T", "StableLM 2 1.6B, 12B", "StableCode 3B"),
)
