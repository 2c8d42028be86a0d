"""Llama 2 to 3.x, SmolLM2, TinyLlama, Yi (arXiv:2307.09288, 2407.21783); Mistral (2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ModelConfig, refuse_unsupported, require, rope_from_hf
from jaxinfer.models.family import Family, Weight, group_heads, stack


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `LlamaConfig` or `MistralConfig`."""
    refuse_unsupported(hf)
    vocab, hidden, intermediate, layers, heads, positions = require(
        hf,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    rope_theta, rope_scaling = rope_from_hf(hf)
    # Only Mistral's modelling code reads the window; a Llama config that carries one ignores it.
    window = hf.get("sliding_window") if hf.get("model_type") == "mistral" else None
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hidden // heads,
        max_position_embeddings=positions,
        rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        hidden_act=hf.get("hidden_act", "silu"),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        sliding_windows=(window,) * layers,
    )


_LAYER = "model.layers.{i}."
_QKV = tuple(_LAYER + f"self_attn.{x}_proj" for x in "qkv")
_GATE_UP = tuple(_LAYER + f"mlp.{x}_proj" for x in ("gate", "up"))


def _named(stems: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(f"{stem}.{kind}" for stem in stems)


WEIGHTS = (
    Weight("embed.embedding", ("model.embed_tokens.weight",)),
    Weight("layers.{i}.input_norm.scale", (_LAYER + "input_layernorm.weight",)),
    Weight(
        "layers.{i}.attention.qkv.kernel", _named(_QKV, "weight"), group_heads, input_major=True
    ),
    Weight(
        "layers.{i}.attention.qkv.bias",
        _named(_QKV, "bias"),
        group_heads,
        when=lambda c: c.attention_bias,
    ),
    Weight(
        "layers.{i}.attention.output.kernel",
        (_LAYER + "self_attn.o_proj.weight",),
        input_major=True,
    ),
    Weight(
        "layers.{i}.attention.output.bias",
        (_LAYER + "self_attn.o_proj.bias",),
        when=lambda c: c.attention_output_bias,
    ),
    Weight("layers.{i}.mlp_norm.scale", (_LAYER + "post_attention_layernorm.weight",)),
    Weight("layers.{i}.mlp.gate_up.kernel", _named(_GATE_UP, "weight"), stack, input_major=True),
    Weight(
        "layers.{i}.mlp.gate_up.bias", _named(_GATE_UP, "bias"), stack, when=lambda c: c.mlp_bias
    ),
    Weight("layers.{i}.mlp.down.kernel", (_LAYER + "mlp.down_proj.weight",), input_major=True),
    Weight("layers.{i}.mlp.down.bias", (_LAYER + "mlp.down_proj.bias",), when=lambda c: c.mlp_bias),
    Weight("final_norm.scale", ("model.norm.weight",)),
    Weight(
        "lm_head.kernel",
        ("lm_head.weight",),
        input_major=True,
        when=lambda c: not c.tie_word_embeddings,
    ),
)

LLAMA = Family(
    name="Llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    config=config_from_hf,
    weights=WEIGHTS,
    examples=("Llama 2, 3, 3.1, 3.2, 3.3", "SmolLM2", "TinyLlama", "Yi"),
)

MISTRAL = Family(
    name="Mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    config=config_from_hf,
    weights=WEIGHTS,
    examples=("Mistral 7B v0.1 to v0.3",),
)
