"""GPT-2: learned positions, LayerNorm, projections stored [in, out]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family, Weight, norm, projection, split_heads, transposed
from jaxinfer.models.hf_config import decoder_config, expect, require
from jaxinfer.nn.norm import NormConfig


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `GPT2Config`, whose keys have names of their own."""
    expect(hf, scale_attn_by_inverse_layer_idx=False)
    hidden, layers, heads, positions = require(hf, "n_embd", "n_layer", "n_head", "n_positions")
    renamed = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "intermediate_size": hf.get("n_inner") or 4 * hidden,
    }
    return decoder_config(
        {**hf, **renamed},
        hidden_act=hf.get("activation_function", "gelu_new"),
        attention_bias=True,
        attention_output_bias=True,
        attention_scale=None if hf.get("scale_attn_weights", True) else 1.0,
        gated_mlp=False,
        mlp_bias=True,
        norm=NormConfig(
            eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            center=True,
            bias=True,
            scale_in_float32=True,
        ),
        learned_positions=True,
        ropes=(),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


def _split_transposed(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    (fused,) = parts
    return split_heads(xp, [fused.T], config)


GPT2 = Family(
    name="GPT-2",
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    config=config_from_hf,
    weights=(
        Weight("embed.embedding", ("wte.weight",)),
        Weight("positions.embedding", ("wpe.weight",)),
        *norm("final_norm", "ln_f"),
        Weight(
            "lm_head.kernel",
            ("lm_head.weight",),
            input_major=True,
            when=lambda c: not c.tie_word_embeddings,
        ),
        *norm("layers.{i}.input_norm", "h.{i}.ln_1"),
        *norm("layers.{i}.mlp_norm", "h.{i}.ln_2"),
        *projection(
            "layers.{i}.attention.qkv",
            "h.{i}.attn.c_attn",
            join=_split_transposed,
            bias=lambda _: True,
        ),
        *projection(
            "layers.{i}.attention.output",
            "h.{i}.attn.c_proj",
            join=transposed,
            bias=lambda _: True,
        ),
        *projection("layers.{i}.mlp.up", "h.{i}.mlp.c_fc", join=transposed, bias=lambda _: True),
        *projection(
            "layers.{i}.mlp.down", "h.{i}.mlp.c_proj", join=transposed, bias=lambda _: True
        ),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"),
    optional_prefix="transformer.",
    examples=("GPT-2 124M to 1.5B", "DistilGPT-2"),
)
