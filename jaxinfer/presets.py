"""Shapes of well-known models, by their published configs, for planning without their files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA_3: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "llama-3-70b": {
        **_LLAMA_3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "attention_bias": False,
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        "rope_theta": 10_000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}
"""By name, a config in the manner of Hugging Face."""
