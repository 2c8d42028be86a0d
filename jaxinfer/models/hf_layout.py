"""Tables of weights in the layout that most Hugging Face checkpoints share, in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import (
    Weight,
    experts,
    group_heads,
    norm,
    projection,
    split_halves,
    stack,
)

_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."

ENDS = (
    Weight("embed.embedding", ("model.embed_tokens.weight",)),
    *norm("final_norm", "model.norm"),
    Weight(
        "lm_head.kernel",
        ("lm_head.weight",),
        input_major=True,
        when=lambda c: not c.tie_word_embeddings,
    ),
)
"""Embedding, last norm, head."""

QKV = projection(
    "layers.{i}.attention.qkv",
    *(_ATTENTION + f"{x}_proj" for x in "qkv"),
    join=group_heads,
    bias=lambda c: c.attention_bias,
)

OUTPUT = projection(
    "layers.{i}.attention.output", _ATTENTION + "o_proj", bias=lambda c: c.attention_output_bias
)


def _by_head(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """OLMo stores the scale of all heads as one row."""
    (scale,) = parts
    return scale.reshape(-1, config.head_dim) if config.qk_norm == "across_heads" else scale


QK_NORMS = tuple(
    Weight(
        f"layers.{{i}}.attention.{x}_norm.scale",
        (_ATTENTION + f"{x}_norm.weight",),
        _by_head,
        when=lambda c: c.qk_norm is not None,
    )
    for x in "qk"
)

GATE_UP = projection(
    "layers.{i}.mlp.gate_up",
    *(_MLP + f"{x}_proj" for x in ("gate", "up")),
    join=stack,
    bias=lambda c: c.mlp_bias,
    in_layer=lambda c, i: not c.is_routed(i),
)

FUSED_GATE_UP = projection(
    "layers.{i}.mlp.gate_up", _MLP + "gate_up_proj", join=split_halves, bias=lambda c: c.mlp_bias
)

DOWN = projection(
    "layers.{i}.mlp.down",
    _MLP + "down_proj",
    bias=lambda c: c.mlp_bias,
    in_layer=lambda c, i: not c.is_routed(i),
)

EXPERTS = (
    *projection("layers.{i}.mlp.router", _MLP + "gate", in_layer=ModelConfig.is_routed),
    *experts(_MLP + "experts.{expert}.", gate="gate_proj", up="up_proj", down="down_proj"),
)


def layer_norms(**stems: str) -> tuple[Weight, ...]:
    """The norms of a block: its name here → its name there."""
    return tuple(
        weight
        for target, stem in stems.items()
        for weight in norm(f"layers.{{i}}.{target}", _LAYER + stem)
    )


PRE_NORMS = layer_norms(input_norm="input_layernorm", mlp_norm="post_attention_layernorm")

PROJECTIONS = (*QKV, *OUTPUT, *GATE_UP, *DOWN)

LLAMA_LIKE = (*ENDS, *PROJECTIONS, *PRE_NORMS)
"""The whole table of a Llama."""
