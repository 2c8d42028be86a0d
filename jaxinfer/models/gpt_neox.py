"""GPT-NeoX and Pythia (arXiv:2204.06745, 2304.01373)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family, Weight, norm, projection
from jaxinfer.models.hf_config import decoder_config, require, rope_from_hf
from jaxinfer.nn.norm import NormConfig


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `GPTNeoXConfig`; the parallel block has two norms."""
    layers, hidden, heads = require(hf, "num_hidden_layers", "hidden_size", "num_attention_heads")
    rope = rope_from_hf(
        hf,
        hidden // heads,
        rope_theta=float(hf.get("rotary_emb_base", 10000)),
        partial_rotary_factor=hf.get("rotary_pct", 0.25),
    )
    bias = bool(hf.get("attention_bias", True))
    return decoder_config(
        hf,
        hidden_act=hf.get("hidden_act", "gelu"),
        attention_bias=bias,
        attention_output_bias=bias,
        gated_mlp=False,
        mlp_bias=True,
        norm=NormConfig(
            eps=float(hf.get("layer_norm_eps", 1e-5)),
            center=True,
            bias=True,
            scale_in_float32=True,
        ),
        parallel_block=bool(hf.get("use_parallel_residual", True)),
        ropes=(rope,) * layers,
    )


def _query_key_value(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """Rows stand by head: its query, its key, its value."""
    (fused,) = parts
    return fused.reshape(config.num_attention_heads, 3, config.head_dim, *fused.shape[1:])


_LAYER = "gpt_neox.layers.{i}."

GPT_NEOX = Family(
    name="GPT-NeoX",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    config=config_from_hf,
    weights=(
        Weight("embed.embedding", ("gpt_neox.embed_in.weight",)),
        *norm("final_norm", "gpt_neox.final_layer_norm"),
        Weight(
            "lm_head.kernel",
            ("embed_out.weight",),
            input_major=True,
            when=lambda c: not c.tie_word_embeddings,
        ),
        *norm("layers.{i}.input_norm", _LAYER + "input_layernorm"),
        *norm("layers.{i}.mlp_norm", _LAYER + "post_attention_layernorm"),
        *projection(
            "layers.{i}.attention.qkv",
            _LAYER + "attention.query_key_value",
            join=_query_key_value,
            bias=lambda c: c.attention_bias,
        ),
        *projection(
            "layers.{i}.attention.output",
            _LAYER + "attention.dense",
            bias=lambda c: c.attention_output_bias,
        ),
        *projection("layers.{i}.mlp.up", _LAYER + "mlp.dense_h_to_4h", bias=lambda c: c.mlp_bias),
        *projection("layers.{i}.mlp.down", _LAYER + "mlp.dense_4h_to_h", bias=lambda c: c.mlp_bias),
    ),
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    examples=("Pythia 14M to 12B", "GPT-NeoX-20B", "Dolly v2"),
)
