"""The model families a GGUF file may hold: one row each, data only.

A row says how GGUF's tensor names become HF's, which metadata key feeds which config key, and what
llama.cpp's converter did to the weights on the way in. A new family is a new row.
"""

from dataclasses import dataclass, field
from typing import Any

# GGUF metadata key without its architecture prefix → HF config key.
COMMON_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}

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

# Carried by the file for llama.cpp's RoPE; they become `rope_scaling` in the config.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """How one GGUF architecture maps to HF.

    Attributes:
        model_type: HF's `model_type`.
        class_name: HF's entry in `architectures`.
        layer_tensors: GGUF name within a layer → HF name within a layer.
        extra_keys: More metadata keys, as in `COMMON_KEYS`.
        constants: Config entries that the family fixes and GGUF does not store.
        permuted_rope: The rows of Q and K are interleaved per head for llama.cpp's RoPE.
        norm_offset: What the converter added to every norm weight.
        sliding_pattern: Every n-th layer attends to everything, the others to the window; 0: no
            such pattern.
        query_scale_layers: Where the config has `query_pre_attn_scalar`: the number of layers of
            the one size (27B) for which it is `hidden_size / num_heads`, not the head dimension.
    """

    model_type: str
    class_name: str
    layer_tensors: dict[str, str]
    extra_keys: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
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
}
