"""The model families a GGUF file may hold: one row each, data only.

A row says how GGUF's tensor names become HF's, which metadata key feeds which config key, and what
llama.cpp's converter did to the weights on the way in. A new family is a new row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints.gguf_layouts import (
    AS_IS,
    EXPERTS_TRANSPOSED,
    GATE_UP_BIAS,
    GATE_UP_COLUMNS,
    LATENT_UP,
    QKV_BY_HEAD,
    TRANSPOSED,
    Layout,
)

# GGUF metadata key without its architecture prefix → HF config key.
COMMON_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}

# Tensors outside the layers.
GLOBAL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

# Tensors of layer i, without `blk.{i}.` and `model.layers.{i}.`.
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORM = {"ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORM = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{n}.gate_proj",
    "ffn_up_exps": "mlp.experts.{n}.up_proj",
    "ffn_down_exps": "mlp.experts.{n}.down_proj",
}

# Carried by the file for llama.cpp's RoPE; they become `rope_scaling` in the config.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Joined:
    """A tensor of an HF layer that GGUF lays out otherwise, or in several.

    Attributes:
        hf_name: Whole, within the layer.
        parts: GGUF names, whole, within the layer.
        layout: How the parts become the tensor.
    """

    hf_name: str
    parts: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """How one GGUF architecture maps to HF.

    Attributes:
        model_type: HF's `model_type`.
        class_name: HF's entry in `architectures`.
        layer_tensors: GGUF name within a layer → HF name within a layer.
        stacked_tensors: The same for tensors that are one for each `{n}` of their first axis.
        joined_tensors: Those of a layer that need more than another name.
        global_tensors: GGUF name → HF name, outside the layers.
        layer_prefix: What HF puts before the names of layer `{i}`.
        norm_keys: The metadata key of the norm's epsilon, as in `COMMON_KEYS`.
        extra_keys: More metadata keys, as in `COMMON_KEYS`.
        required: Those HF keys without which such a model makes no sense.
        flags: Metadata keys that are true or false → HF keys.
        constants: Config entries that the family fixes and GGUF does not store.
        present: HF key → the tensor of the first layer whose presence it states.
        absent: HF key → the tensor of the first layer whose absence it states.
        aliases: HF key → the name by which this family's config calls it as well.
        rope_constants: As `constants`, in `rope_scaling`.
        partial_rotation: The config always says which part of a head is rotated.
        latent_attention: Head sizes are DeepSeek's.
        windowed_as: HF's `model_type` and class for a file with a sliding window.
        sigmoid_as: The same for a file whose experts' scores are sigmoids.
        permuted_rope: The rows of Q and K are interleaved per head for llama.cpp's RoPE.
        norm_offset: What the converter added to every norm weight.
        sliding_pattern: Every n-th layer attends to everything, the others to the window; 0: no
            such pattern.
        query_scale_layers: Where the config has `query_pre_attn_scalar`: the number of layers of
            the one size (27B) for which it is `hidden_size / num_heads`, not the head dimension.
    """

    model_type: str
    class_name: str
    layer_tensors: Mapping[str, str]
    stacked_tensors: Mapping[str, str] = field(default_factory=dict)
    joined_tensors: tuple[Joined, ...] = ()
    global_tensors: Mapping[str, str] = field(default_factory=lambda: GLOBAL_TENSORS)
    layer_prefix: str = "model.layers.{i}."
    norm_keys: Mapping[str, str] = field(default_factory=lambda: RMS_NORM)
    extra_keys: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_constants: Mapping[str, Any] = field(default_factory=dict)
    partial_rotation: bool = False
    latent_attention: bool = False
    windowed_as: tuple[str, str] | None = None
    sigmoid_as: tuple[str, str] | None = None
    permuted_rope: bool = False
    norm_offset: float = 0.0
    sliding_pattern: int = 0
    query_scale_layers: int | None = None


_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_SILU = {"hidden_act": "silu"}

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        layer_tensors=_ATTENTION | _MLP | _PRE_NORM,
        constants=_SILU,
        permuted_rope=True,
        # GGUF calls Mistral a llama; only the window tells them apart.
        windowed_as=("mistral", "MistralForCausalLM"),
    ),
    "qwen2": GgufArchitecture(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        layer_tensors=_ATTENTION | _MLP | _PRE_NORM,
        constants=_SILU | {"attention_bias": True, "use_sliding_window": False},
    ),
    "qwen3": GgufArchitecture(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        layer_tensors=_ATTENTION | _QK_NORM | _MLP | _PRE_NORM,
        constants=_SILU | {"use_sliding_window": False},
    ),
    "gemma": GgufArchitecture(
        model_type="gemma",
        class_name="GemmaForCausalLM",
        layer_tensors=_ATTENTION | _MLP | _PRE_NORM,
        constants=_GEMMA,
        norm_offset=1.0,
    ),
    "gemma2": GgufArchitecture(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        layer_tensors=_ATTENTION | _MLP | _SANDWICH_NORM,
        extra_keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        constants=_GEMMA,
        norm_offset=1.0,
        sliding_pattern=2,
        query_scale_layers=46,
    ),
    "gemma3": GgufArchitecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        layer_tensors=_ATTENTION | _QK_NORM | _MLP | _SANDWICH_NORM,
        extra_keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        constants=_GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
        norm_offset=1.0,
        sliding_pattern=6,
        query_scale_layers=62,
    ),
    "phi3": GgufArchitecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        layer_tensors=_PRE_NORM
        | {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        constants=_SILU,
    ),
    "smollm3": GgufArchitecture(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        layer_tensors=_ATTENTION | _MLP | _PRE_NORM,
        constants=_SILU | {"use_sliding_window": False, "no_rope_layer_interval": 4},
        permuted_rope=True,
    ),
    "olmo2": GgufArchitecture(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        layer_tensors={k: v for k, v in _ATTENTION.items() if k != "attn_norm"}
        | _QK_NORM
        | _MLP
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        constants=_SILU,
        sliding_pattern=4,
        windowed_as=("olmo3", "Olmo3ForCausalLM"),
    ),
    "granite": GgufArchitecture(
        model_type="granite",
        class_name="GraniteForCausalLM",
        layer_tensors=_ATTENTION | _MLP | _PRE_NORM,
        extra_keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        constants=_SILU,
        permuted_rope=True,
    ),
    "glm4": GgufArchitecture(
        model_type="glm4",
        class_name="Glm4ForCausalLM",
        layer_tensors=_ATTENTION
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        constants=_SILU,
        partial_rotation=True,
    ),
    "command-r": GgufArchitecture(
        model_type="cohere",
        class_name="CohereForCausalLM",
        layer_tensors=_ATTENTION | _QK_NORM | _MLP,
        norm_keys=LAYER_NORM,
        extra_keys={"logit_scale": "logit_scale"},
        constants=_SILU,
        present={"use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": GgufArchitecture(
        model_type="cohere2",
        class_name="Cohere2ForCausalLM",
        layer_tensors=_ATTENTION | _MLP,
        norm_keys=LAYER_NORM,
        extra_keys={"logit_scale": "logit_scale"},
        constants=_SILU,
        sliding_pattern=4,
    ),
    "stablelm": GgufArchitecture(
        model_type="stablelm",
        class_name="StableLmForCausalLM",
        layer_tensors=_ATTENTION | _MLP | _PRE_NORM,
        stacked_tensors={
            "attn_q_norm": "self_attn.q_layernorm.norms.{n}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{n}",
        },
        norm_keys=LAYER_NORM,
        constants=_SILU,
        present={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        # The key of this name says true where a config says nothing and means false.
        absent={"use_parallel_residual": "ffn_norm.weight"},
        partial_rotation=True,
    ),
    "gptneox": GgufArchitecture(
        model_type="gpt_neox",
        class_name="GPTNeoXForCausalLM",
        layer_tensors={
            "attn_norm": "input_layernorm",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        joined_tensors=tuple(
            Joined(f"attention.query_key_value.{kind}", (f"attn_qkv.{kind}",), QKV_BY_HEAD)
            for kind in ("weight", "bias")
        ),
        global_tensors={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layer_prefix="gpt_neox.layers.{i}.",
        norm_keys=LAYER_NORM,
        flags={"use_parallel_residual": "use_parallel_residual"},
        constants={"hidden_act": "gelu"},
        present={"attention_bias": "attn_qkv.bias"},
        aliases={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        partial_rotation=True,
    ),
    "gpt2": GgufArchitecture(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        layer_tensors={"attn_norm": "ln_1", "ffn_norm": "ln_2"},
        joined_tensors=tuple(
            Joined(f"{hf_name}.{kind}", (f"{name}.{kind}",), layout)
            for name, hf_name in {
                "attn_qkv": "attn.c_attn",
                "attn_output": "attn.c_proj",
                "ffn_up": "mlp.c_fc",
                "ffn_down": "mlp.c_proj",
            }.items()
            for kind, layout in {"weight": TRANSPOSED, "bias": AS_IS}.items()
        ),
        global_tensors={
            "token_embd": "wte",
            "position_embd": "wpe",
            "output_norm": "ln_f",
            "output": "lm_head",
        },
        layer_prefix="h.{i}.",
        norm_keys=LAYER_NORM,
        constants={"activation_function": "gelu_new"},
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "layer_norm_eps": "layer_norm_epsilon",
        },
    ),
    "qwen3moe": GgufArchitecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        layer_tensors=_ATTENTION | _QK_NORM | _PRE_NORM | _ROUTER,
        stacked_tensors=_EXPERTS,
        extra_keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        required=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        flags={"expert_weights_norm": "norm_topk_prob"},
        constants=_SILU
        | {"use_sliding_window": False, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "olmoe": GgufArchitecture(
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        layer_tensors=_ATTENTION | _QK_NORM | _PRE_NORM | _ROUTER,
        stacked_tensors=_EXPERTS,
        extra_keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.clamp_kqv": "clip_qkv",
        },
        required=("num_experts", "num_experts_per_tok"),
        flags={"expert_weights_norm": "norm_topk_prob"},
        constants=_SILU | {"norm_topk_prob": False},
    ),
    "gpt-oss": GgufArchitecture(
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        layer_tensors=_ATTENTION
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        joined_tensors=(
            Joined("self_attn.sinks", ("attn_sinks.weight",), AS_IS),
            Joined(
                "mlp.experts.gate_up_proj",
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
                GATE_UP_COLUMNS,
            ),
            Joined(
                "mlp.experts.gate_up_proj_bias",
                ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
                GATE_UP_BIAS,
            ),
            Joined("mlp.experts.down_proj", ("ffn_down_exps.weight",), EXPERTS_TRANSPOSED),
            Joined("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",), AS_IS),
        ),
        extra_keys={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        required=("num_local_experts", "num_experts_per_tok"),
        constants=_SILU | {"swiglu_limit": 7.0},
        rope_constants={"truncate": False},
        sliding_pattern=2,
    ),
    "deepseek2": GgufArchitecture(
        model_type="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        layer_tensors=_MLP
        | _PRE_NORM
        | _ROUTER
        | {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            # Of files from before May 2025.
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        stacked_tensors=_EXPERTS,
        joined_tensors=(
            Joined("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), LATENT_UP),
            Joined("mlp.gate.e_score_correction_bias", ("exp_probs_b.bias",), AS_IS),
        ),
        extra_keys={
            "leading_dense_block_count": "first_k_dense_replace",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
        },
        required=(
            "kv_lora_rank",
            "n_routed_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
        ),
        flags={"expert_weights_norm": "norm_topk_prob"},
        constants=_SILU | {"norm_topk_prob": False},
        latent_attention=True,
        sigmoid_as=("deepseek_v3", "DeepseekV3ForCausalLM"),
    ),
}

# Rows for files of the same name whose feed-forwards are experts.
EXPERT_VARIANTS: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        layer_tensors=_ATTENTION | _PRE_NORM | {"ffn_gate_inp": "block_sparse_moe.gate"},
        stacked_tensors={
            "ffn_gate_exps": "block_sparse_moe.experts.{n}.w1",
            "ffn_down_exps": "block_sparse_moe.experts.{n}.w2",
            "ffn_up_exps": "block_sparse_moe.experts.{n}.w3",
        },
        extra_keys={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        required=("num_local_experts", "num_experts_per_tok"),
        constants=_SILU,
        permuted_rope=True,
    ),
}


def hf_classes() -> frozenset[str]:
    """The HF classes whose models may come from a GGUF file."""
    rows = (*ARCHITECTURES.values(), *EXPERT_VARIANTS.values())
    others = (name for row in rows for name in (row.windowed_as, row.sigmoid_as) if name)
    return frozenset({row.class_name for row in rows} | {name[1] for name in others})
