"""DeepSeek-V2 and V3 (arXiv:2405.04434, 2412.19437): latent attention, shared experts, groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.family import Family, Weight, norm, projection, stack
from jaxinfer.models.hf_config import (
    decoder_config,
    expect,
    projection_biases,
    require,
    rope_from_hf,
)
from jaxinfer.models.hf_layout import DOWN, ENDS, EXPERTS, GATE_UP, OUTPUT, PRE_NORMS
from jaxinfer.nn.latent_attention import LatentConfig
from jaxinfer.nn.moe import MoEConfig


def v2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `DeepseekV2Config`: a group of experts is as good as its best."""
    expect(hf, scoring_func="softmax", norm_topk_prob=False)
    grouped = hf.get("topk_method", "greedy") != "greedy"
    if grouped:
        expect(hf, topk_method="group_limited_greedy")
    return _config(hf, interleaved=True, grouped=grouped, norm_topk_prob=False)


def v3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate `DeepseekV3Config`: a group is as good as its best two, corrected for balance."""
    expect(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    return _config(
        hf,
        interleaved=bool(hf.get("rope_interleave", True)),
        grouped=True,
        norm_topk_prob=bool(hf.get("norm_topk_prob", True)),
        scoring="sigmoid",
        group_top=2,
        correction_bias=True,
    )


def _config(hf: Mapping[str, Any], *, interleaved: bool, grouped: bool, **moe: Any) -> ModelConfig:
    expect(hf, moe_layer_freq=1)
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_lora_rank, nope, rotary, v_head_dim = require(hf, *sizes)
    layers, num_experts, visited, intermediate = require(
        hf, "num_hidden_layers", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"
    )
    first = hf.get("first_k_dense_replace", 0)
    rope = rope_from_hf(hf, rotary, interleaved=interleaved)
    latent = LatentConfig(
        q_lora_rank=hf.get("q_lora_rank"),
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=v_head_dim,
    )
    return decoder_config(
        hf,
        **projection_biases(hf),
        latent=latent,
        num_key_value_heads=1,
        head_dim=latent.cached_dim,
        attention_scale=(nope + rotary) ** -0.5 * rope.score_factor,
        ropes=(rope,) * layers,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=visited,
            intermediate_size=intermediate,
            shared_intermediate_size=intermediate * (hf.get("n_shared_experts") or 0),
            num_groups=(hf.get("n_group") or 1) if grouped else 1,
            num_groups_per_tok=(hf.get("topk_group") or 1) if grouped else 1,
            routed_scaling_factor=float(hf.get("routed_scaling_factor", 1.0)),
            **moe,
        ),
        moe_layers=tuple(i >= first for i in range(layers)),
    )


def _split_up(xp: ModuleType, rows: Any, config: ModelConfig) -> Any:
    """Rows [N * (nope + v), R], by head: keys' [N, nope, R] and values' [N, v, R]."""
    assert config.latent is not None
    by_head = rows.reshape(config.num_attention_heads, -1, rows.shape[-1])
    return xp.split(by_head, [config.latent.qk_nope_head_dim], axis=1)


def _by_head(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    (rows,) = parts
    return rows.reshape(config.num_attention_heads, -1, rows.shape[-1])


def _has_query_rank(config: ModelConfig) -> bool:
    return config.latent is not None and config.latent.q_lora_rank is not None


_HERE = "layers.{i}.attention."
_THERE = "model.layers.{i}.self_attn."
_SHARED = "model.layers.{i}.mlp.shared_experts."

_QUERY = _HERE + "query.kernel"
_UP = (_THERE + "kv_b_proj.weight",)

_ATTENTION = (
    *projection(
        _HERE + "query_down",
        _THERE + "q_a_proj",
        when=_has_query_rank,
        bias=lambda c: c.attention_bias,
    ),
    *norm(_HERE + "query_norm", _THERE + "q_a_layernorm", when=_has_query_rank),
    *projection(_HERE + "query", _THERE + "q_b_proj", join=_by_head, when=_has_query_rank),
    *projection(
        _HERE + "query", _THERE + "q_proj", join=_by_head, when=lambda c: not _has_query_rank(c)
    ),
    *projection(_HERE + "latent", _THERE + "kv_a_proj_with_mqa", bias=lambda c: c.attention_bias),
    *norm(_HERE + "latent_norm", _THERE + "kv_a_layernorm"),
    Weight(_HERE + "key_up", _UP, lambda xp, parts, c: _split_up(xp, parts[0], c)[0]),
    Weight(_HERE + "value_up", _UP, lambda xp, parts, c: _split_up(xp, parts[0], c)[1]),
    *OUTPUT,
)

_SHARED_EXPERTS = (
    *projection(
        "layers.{i}.mlp.shared.gate_up",
        _SHARED + "gate_proj",
        _SHARED + "up_proj",
        join=stack,
        in_layer=ModelConfig.is_routed,
    ),
    *projection(
        "layers.{i}.mlp.shared.down", _SHARED + "down_proj", in_layer=ModelConfig.is_routed
    ),
)

_WEIGHTS = (
    *ENDS, *_ATTENTION, *PRE_NORMS, *GATE_UP, *DOWN, *EXPERTS, *_SHARED_EXPERTS,
)  # fmt: skip

DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    config=v2_config,
    weights=_WEIGHTS,
    examples=("DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V2.5", "DeepSeek-Coder-V2"),
)

DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    config=v3_config,
    weights=(
        *_WEIGHTS,
        Weight(
            "layers.{i}.mlp.correction_bias",
            ("model.layers.{i}.mlp.gate.e_score_correction_bias",),
            in_layer=ModelConfig.is_routed,
        ),
    ),
    drafts=True,
    examples=("DeepSeek-V3, V3.1 and R1, as bfloat16",),
)
