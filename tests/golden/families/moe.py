"""The mixture-of-experts families; see `dense.py`."""

from __future__ import annotations

from spec import Family, llama_like

# Of V2 and V3, whose factors differ.
_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 8, "original_max_position_embeddings": 32,
    "type": "yarn",
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip

MIXTRAL = (
    Family(
        name="mixtral",
        config=llama_like(
            "MixtralForCausalLM", "mixtral", 32, 4, 2, 24, 2,
            num_experts_per_tok=2, num_local_experts=8, output_router_logits=False,
            rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None,
            tie_word_embeddings=False,
        ),
        teeth=[{"num_experts_per_tok": 3}],
    ),
    Family(
        name="qwen3_moe",
        config=llama_like(
            "Qwen3MoeForCausalLM", "qwen3_moe", 32, 4, 2, 64, 2,
            attention_bias=False, decoder_sparse_step=1, head_dim=16, max_window_layers=2,
            mlp_only_layers=[], moe_intermediate_size=16, norm_topk_prob=True, num_experts=8,
            num_experts_per_tok=3, output_router_logits=False, rope_scaling=None,
            rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
            use_sliding_window=False, tie_word_embeddings=False,
        ),
        teeth=[{"norm_topk_prob": False}, {"num_experts_per_tok": 2}],
    ),
    # No release mixes dense layers in; the keys that would are in every one of them.
    Family(
        name="qwen3_moe_mixed",
        config=llama_like(
            "Qwen3MoeForCausalLM", "qwen3_moe", 32, 4, 2, 32, 4,
            attention_bias=False, decoder_sparse_step=2, head_dim=8, max_window_layers=4,
            mlp_only_layers=[3], moe_intermediate_size=16, norm_topk_prob=False, num_experts=8,
            num_experts_per_tok=2, output_router_logits=False, rope_scaling=None,
            rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
            use_sliding_window=False, tie_word_embeddings=False,
        ),
        teeth=[{"norm_topk_prob": True}],
    ),
    Family(
        name="olmoe",
        config=llama_like(
            "OlmoeForCausalLM", "olmoe", 32, 4, 4, 16, 2,
            attention_bias=False, clip_qkv=None, norm_topk_prob=False, num_experts=8,
            num_experts_per_tok=3, output_router_logits=False, rope_scaling=None,
            rope_theta=10000.0, router_aux_loss_coef=0.01, tie_word_embeddings=False,
        ),
        teeth=[{"norm_topk_prob": True}, {"clip_qkv": 1.0}],
    ),
)  # fmt: skip

_GPT_OSS = llama_like(
    "GptOssForCausalLM", "gpt_oss", 32, 4, 2, 32, 2,
    attention_bias=True, experts_per_token=2, head_dim=16, initial_context_length=32,
    layer_types=["sliding_attention", "full_attention"], num_experts_per_tok=2,
    num_local_experts=8, output_router_logits=False, router_aux_loss_coef=0.9,
    rms_norm_eps=1e-5,
    rope_scaling={
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 32, "rope_type": "yarn", "truncate": False,
    },
    rope_theta=150000, sliding_window=16, swiglu_limit=2.5, tie_word_embeddings=False,
)  # fmt: skip
_GPT_OSS_TEETH = (
    {"swiglu_limit": 7.0}, {"sliding_window": 15}, {"rope_scaling.truncate": True},
    {"rope_scaling": {"rope_type": "default"}}, {"num_experts_per_tok": 3},
)  # fmt: skip

GPT_OSS = (
    Family(
        name="gpt_oss",
        config=_GPT_OSS | {
            "quantization_config": {
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router",
                    "model.embed_tokens", "lm_head",
                ],
                "quant_method": "mxfp4",
            },
        },
        mxfp4=True,
    ),
    # As people fine-tune it: the experts as plain matrices, input first.
    Family(name="gpt_oss_bf16", config=_GPT_OSS | {"num_local_experts": 4}, teeth=_GPT_OSS_TEETH),
)  # fmt: skip

DEEPSEEK = (
    Family(
        name="deepseek_v2_lite",
        config=llama_like(
            "DeepseekV2ForCausalLM", "deepseek_v2", 32, 4, 4, 32, 3,
            attention_bias=False, aux_loss_alpha=0.001, first_k_dense_replace=1,
            moe_intermediate_size=16, moe_layer_freq=1, n_group=1, n_routed_experts=8,
            n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=3, q_lora_rank=None,
            rope_scaling=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True,
            tie_word_embeddings=False, topk_group=1, topk_method="greedy", **_LATENT,
        ),
        teeth=[
            {"rope_scaling": None}, {"rope_scaling.mscale_all_dim": 0},
            {"rope_scaling.mscale": 1.0}, {"num_experts_per_tok": 2},
        ],
    ),
    Family(
        name="deepseek_v2",
        config=llama_like(
            "DeepseekV2ForCausalLM", "deepseek_v2", 32, 4, 4, 32, 3,
            attention_bias=False, aux_loss_alpha=0.001, first_k_dense_replace=1,
            moe_intermediate_size=8, moe_layer_freq=1, n_group=4, n_routed_experts=16,
            n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=4, q_lora_rank=24,
            rope_scaling=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            rope_theta=10000, routed_scaling_factor=2.0, scoring_func="softmax", seq_aux=True,
            tie_word_embeddings=False, topk_group=2, topk_method="group_limited_greedy",
            **_LATENT,
        ),
        teeth=[
            {"topk_method": "greedy"}, {"topk_group": 3}, {"routed_scaling_factor": 1.0},
        ],
    ),
    Family(
        name="deepseek_v3",
        config=llama_like(
            "DeepseekV3ForCausalLM", "deepseek_v3", 32, 4, 4, 32, 3,
            attention_bias=False, aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=1,
            moe_intermediate_size=8, moe_layer_freq=1, n_group=4, n_routed_experts=16,
            n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=4,
            num_nextn_predict_layers=1, q_lora_rank=24,
            rope_scaling=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True,
            tie_word_embeddings=False, topk_group=2, topk_method="noaux_tc", **_LATENT,
        ),
        teeth=[
            {"topk_group": 3}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0},
            {"rope_scaling.mscale_all_dim": 0}, {"rope_interleave": False},
        ],
    ),
)  # fmt: skip

FAMILIES = (*MIXTRAL, *GPT_OSS, *DEEPSEEK)
