"""The dense families, and the RoPE variants on a Llama body.

Each `config.json` has the keys of a released checkpoint of its family, with small numbers. Where a
released value would not show at this size (a soft-cap of 50 on scores below 5), the value is
smaller too: `teeth` proves that each feature moves the logits.
"""

from __future__ import annotations

from spec import ORIGINAL_LENGTH, Family, llama_like, shape

GEMMA_SHAPE = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "head_dim": 16}
SHORT_FACTOR = (1.0, 1.05, 1.1, 1.25, 1.4, 1.6, 1.9, 2.3)
LONG_FACTOR = (1.1, 1.5, 2.1, 3.2, 4.8, 6.5, 8.0, 9.5)


def _longrope(num_pairs: int, **more) -> dict:
    return {
        "long_factor": list(LONG_FACTOR[:num_pairs]),
        "short_factor": list(SHORT_FACTOR[:num_pairs]),
        **more,
    }


QWEN = (
    Family(
        name="qwen2",
        config=llama_like(
            "Qwen2ForCausalLM", "qwen2", 32, 4, 2, 64, 3,
            max_window_layers=2, rope_theta=1000000.0, sliding_window=16,
            use_sliding_window=False, tie_word_embeddings=True,
        ),
        teeth=[{"use_sliding_window": True}, {"rope_theta": 1e4}],
    ),
    Family(
        name="qwen2_window",
        config=llama_like(
            "Qwen2ForCausalLM", "qwen2", 32, 4, 2, 32, 4,
            max_window_layers=2, rope_theta=1000000.0, sliding_window=16,
            use_sliding_window=True, tie_word_embeddings=False,
        ),
        teeth=[{"use_sliding_window": False}, {"max_window_layers": 0}, {"sliding_window": 15}],
    ),
    Family(
        name="qwen3",
        config=llama_like(
            "Qwen3ForCausalLM", "qwen3", 32, 4, 2, 64, 3,
            head_dim=16, attention_bias=False, max_window_layers=3, rope_theta=1000000,
            rope_scaling=None, sliding_window=None, use_sliding_window=False,
            tie_word_embeddings=True,
        ),
        teeth=[{"rope_theta": 1e4}],
    ),
)  # fmt: skip

GEMMA = (
    # The first release says "gelu" and means its tanh approximation, and leaves tying to a default.
    Family(
        name="gemma",
        config={
            "architectures": ["GemmaForCausalLM"], "model_type": "gemma",
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "gelu",
            "rope_theta": 10000.0, "rope_scaling": None,
            **shape(32, 4, 1, 64, 3, head_dim=16), "rms_norm_eps": 1e-6,
        },
        embed_std=0.25, plus_one=True,
        teeth=[{"rope_theta": 1e5}, {"hidden_act": "gelu_python"}, {"hidden_act": "silu"}],
    ),
    Family(
        name="gemma2",
        config={
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2",
            "attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid",
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 12, "rope_theta": 10000.0, "sliding_window": 16,
            "hidden_act": "gelu_pytorch_tanh", **shape(32, 4, 2, 32, 4), **GEMMA_SHAPE,
        },
        embed_std=0.25, post_norm=(1.5, 4.0), plus_one=True,
        teeth=[
            {"attn_logit_softcapping": None}, {"final_logit_softcapping": None},
            {"query_pre_attn_scalar": 16}, {"sliding_window": 15},
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
        ],
    ),
    Family(
        name="gemma3",
        config={
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
            "attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid",
            "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "query_pre_attn_scalar": 12, "rope_local_base_freq": 10000, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": 6,
            **shape(32, 4, 1, 32, 6), **GEMMA_SHAPE,
        },
        embed_std=0.25, post_norm=(1.5, 4.0), plus_one=True,
        teeth=[
            {"query_pre_attn_scalar": 16}, {"rope_local_base_freq": 1000000},
            {"rope_theta": 10000}, {"sliding_window": 15}, {"sliding_window_pattern": 3},
        ],
    ),
    # As in the 4B and larger models, whose global layers see positions divided by 8.
    Family(
        name="gemma3_linear",
        config={
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
            "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16, "rope_local_base_freq": 10000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1000000.0, "sliding_window": 16, "use_bidirectional_attention": False,
            **shape(32, 4, 2, 48, 3), **GEMMA_SHAPE,
        },
        embed_std=0.25, post_norm=(1.5, 4.0), plus_one=True,
        teeth=[{"rope_scaling": None}, {"rope_scaling.factor": 4.0}, {"sliding_window": 15}],
    ),
)  # fmt: skip

PHI = (
    Family(
        name="phi3",
        config=llama_like(
            "Phi3ForCausalLM", "phi3", 32, 4, 4, 48, 3,
            embd_pdrop=0.0, resid_pdrop=0.0, original_max_position_embeddings=256,
            rope_scaling=None, rope_theta=10000.0, sliding_window=16, attention_bias=False,
            tie_word_embeddings=False,
        ),
        teeth=[{"sliding_window": None}, {"sliding_window": 15}],
    ),
    Family(
        name="phi3_longrope",
        config=llama_like(
            "Phi3ForCausalLM", "phi3", 32, 4, 4, 32, 3,
            embd_pdrop=0.0, resid_pdrop=0.0, original_max_position_embeddings=ORIGINAL_LENGTH,
            rope_scaling=_longrope(4, type="longrope"), rope_theta=10000.0, sliding_window=512,
            attention_bias=False, tie_word_embeddings=False,
        ),
        depends_on_length=True,
        teeth=[
            {"rope_scaling": None}, {"rope_scaling.long_factor": [1.0] * 4},
            {"max_position_embeddings": ORIGINAL_LENGTH},
        ],
    ),
    Family(
        name="phi4_mini",
        config=llama_like(
            "Phi3ForCausalLM", "phi3", 48, 3, 1, 48, 3,
            embd_pdrop=0.0, resid_pdrop=0.0, original_max_position_embeddings=ORIGINAL_LENGTH,
            rope_scaling=_longrope(6, type="longrope") | {"short_factor": [1.0] * 6},
            rope_theta=10000.0, partial_rotary_factor=0.75, sliding_window=512,
            attention_bias=False, lm_head_bias=False, mlp_bias=False, full_attn_mod=1,
            interpolate_factor=1, tie_word_embeddings=True,
        ),
        depends_on_length=True,
        teeth=[{"rope_scaling.long_factor": [1.0] * 6}, {"max_position_embeddings": 512}],
    ),
)  # fmt: skip

LLAMA_LIKE = (
    Family(
        name="smollm3",
        config=llama_like(
            "SmolLM3ForCausalLM", "smollm3", 32, 4, 2, 48, 4,
            attention_bias=False, mlp_bias=False, layer_types=["full_attention"] * 4,
            max_window_layers=28, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0],
            rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
            use_sliding_window=False, tie_word_embeddings=True,
        ),
        teeth=[{"no_rope_layers": [1, 1, 1, 1]}, {"no_rope_layers": [0, 0, 0, 1]}],
    ),
    Family(
        name="olmo2",
        config=llama_like(
            "Olmo2ForCausalLM", "olmo2", 32, 4, 2, 64, 3,
            attention_bias=False, rope_scaling=None, rope_theta=500000,
            tie_word_embeddings=False,
        ),
        teeth=[{"rope_theta": 1e4}],
    ),
    Family(
        name="olmo3",
        config=llama_like(
            "Olmo3ForCausalLM", "olmo3", 32, 4, 4, 32, 4,
            attention_bias=False,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            rope_scaling={
                "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1,
                "factor": 8.0, "original_max_position_embeddings": 32, "rope_type": "yarn",
            },
            rope_theta=500000, sliding_window=16, tie_word_embeddings=False,
        ),
        teeth=[
            {"rope_scaling": None}, {"rope_scaling.attention_factor": 1.0},
            {"rope_scaling.factor": 2.0}, {"sliding_window": 15},
        ],
    ),
    Family(
        name="granite",
        config=llama_like(
            "GraniteForCausalLM", "granite", 32, 4, 2, 64, 3,
            attention_bias=False, mlp_bias=False, attention_multiplier=0.2,
            embedding_multiplier=1.5, logits_scaling=0.5, residual_multiplier=0.6,
            rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=True,
        ),
        embed_std=0.2,
        teeth=[
            {"attention_multiplier": 0.35}, {"embedding_multiplier": 1.0},
            {"logits_scaling": 1.0}, {"residual_multiplier": 1.0},
        ],
    ),
    Family(
        name="glm4",
        config=llama_like(
            "Glm4ForCausalLM", "glm4", 32, 4, 2, 48, 3,
            attention_bias=True, head_dim=16, partial_rotary_factor=0.5, rope_theta=10000.0,
            tie_word_embeddings=False,
        ),
        teeth=[{"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.25}],
    ),
)  # fmt: skip

COHERE = (
    Family(
        name="cohere",
        config={
            "architectures": ["CohereForCausalLM"], "model_type": "cohere",
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
            "layer_norm_eps": 1e-5, "logit_scale": 0.5, "rope_theta": 8000000.0,
            "use_qk_norm": False, **shape(32, 4, 4, 64, 3),
        },
        embed_std=0.7,
        teeth=[{"logit_scale": 0.25}, {"rope_theta": 1e4}],
    ),
    # As in Command R+.
    Family(
        name="cohere_qk_norm",
        config={
            "architectures": ["CohereForCausalLM"], "model_type": "cohere",
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
            "layer_norm_eps": 1e-5, "logit_scale": 0.8333333333333334, "rope_theta": 75000000.0,
            "use_qk_norm": True, **shape(32, 4, 2, 64, 2),
        },
        embed_std=0.5,
        teeth=[{"logit_scale": 0.25}, {"use_qk_norm": False}],
    ),
    Family(
        name="cohere2",
        config={
            "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2",
            "attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid",
            "head_dim": 8, "hidden_act": "silu", "layer_norm_eps": 1e-5, "layer_switch": 4,
            "logit_scale": 0.5, "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000,
            "rotary_pct": 1.0, "sliding_window": 16, "sliding_window_pattern": 4,
            "use_embedding_sharing": True, "use_gated_activation": True,
            "use_parallel_block": True, "use_parallel_embedding": True,
            **shape(32, 4, 2, 48, 4),
        },
        embed_std=0.7,
        teeth=[
            {"logit_scale": 0.25}, {"sliding_window": 15}, {"sliding_window_pattern": 2},
            {"rope_theta": 1000},
        ],
    ),
)  # fmt: skip

RESEARCH = (
    # As in StableLM 2 1.6B.
    Family(
        name="stablelm",
        config={
            "architectures": ["StableLmForCausalLM"], "model_type": "stablelm",
            "attention_dropout": 0.0, "hidden_act": "silu", "hidden_dropout": 0.0,
            "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "qk_layernorm": False,
            "rope_theta": 10000, "tie_word_embeddings": False, "use_parallel_residual": False,
            "use_qkv_bias": True, **shape(32, 2, 2, 48, 3),
        },
        teeth=[{"partial_rotary_factor": 0.5}],
    ),
    # As in StableLM 2 12B.
    Family(
        name="stablelm_parallel",
        config={
            "architectures": ["StableLmForCausalLM"], "model_type": "stablelm",
            "attention_dropout": 0.0, "hidden_act": "silu", "hidden_dropout": 0.0,
            "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "qk_layernorm": True,
            "rope_theta": 10000, "tie_word_embeddings": False, "use_parallel_residual": True,
            "use_qkv_bias": False, **shape(32, 2, 1, 64, 2),
        },
        teeth=[{"qk_layernorm": False}],
    ),
    Family(
        name="gpt_neox",
        config={
            "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox",
            "attention_dropout": 0.0, "classifier_dropout": 0.1, "hidden_act": "gelu",
            "hidden_dropout": 0.0, "hidden_size": 32, "intermediate_size": 64,
            "layer_norm_eps": 1e-5, "num_attention_heads": 2, "num_hidden_layers": 3,
            "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "use_parallel_residual": True,
        },
        dtype="float16", rename=[("lm_head.", "embed_out.")],
        teeth=[{"use_parallel_residual": False}, {"rotary_pct": 0.5}, {"hidden_act": "gelu_new"}],
    ),
    Family(
        name="gpt_neox_sequential",
        config={
            "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox",
            "hidden_act": "gelu", "hidden_size": 32, "intermediate_size": 64,
            "layer_norm_eps": 1e-5, "num_attention_heads": 4, "num_hidden_layers": 2,
            "rotary_emb_base": 10000, "rotary_pct": 1.0, "tie_word_embeddings": False,
            "use_parallel_residual": False,
        },
        dtype="float16", rename=[("lm_head.", "embed_out.")],
        teeth=[{"use_parallel_residual": True}, {"rotary_emb_base": 100}],
    ),
    # The released file has no "transformer." in front.
    Family(
        name="gpt2",
        config={
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
            "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5, "n_ctx": 128, "n_embd": 24, "n_head": 3, "n_layer": 3,
            "n_positions": 128, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
            "summary_type": "cls_index", "summary_use_proj": True,
        },
        dtype="float16", rename=[("transformer.", "")], embed_std=0.4,
        teeth=[{"activation_function": "gelu"}, {"scale_attn_weights": False}],
    ),
)  # fmt: skip

ROPE = (
    Family(
        name="llama_dynamic",
        config=llama_like(
            "LlamaForCausalLM", "llama", 32, 4, 2, 64, 2,
            max_position_embeddings=ORIGINAL_LENGTH, rope_theta=10000.0,
            rope_scaling={"type": "dynamic", "factor": 2.0}, tie_word_embeddings=False,
        ),
        depends_on_length=True,
        teeth=[{"rope_scaling": None}, {"rope_scaling.factor": 4.0}],
    ),
    Family(
        name="llama_yarn",
        config=llama_like(
            "LlamaForCausalLM", "llama", 32, 2, 1, 64, 2,
            rope_theta=10000.0, tie_word_embeddings=False,
            rope_scaling={
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
            },
        ),
        teeth=[{"rope_scaling": None}, {"rope_scaling.factor": 2.0}],
    ),
    # What the default of no setting would do is set otherwise here.
    Family(
        name="llama_yarn_options",
        config=llama_like(
            "LlamaForCausalLM", "llama", 32, 2, 1, 64, 2,
            rope_theta=10000.0, tie_word_embeddings=False,
            rope_scaling={
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        ),
        teeth=[
            {"rope_scaling.truncate": True}, {"rope_scaling.beta_fast": 32.0},
            {"rope_scaling.beta_slow": 1.0}, {"rope_scaling.mscale": 0.5},
        ],
    ),
    Family(
        name="llama_longrope",
        config=llama_like(
            "LlamaForCausalLM", "llama", 32, 4, 2, 64, 2,
            rope_theta=10000.0, tie_word_embeddings=False,
            rope_scaling=_longrope(
                4, rope_type="longrope", factor=4.0,
                original_max_position_embeddings=ORIGINAL_LENGTH,
            ),
        ),
        depends_on_length=True,
        teeth=[{"rope_scaling": None}, {"rope_scaling.factor": 1.0}],
    ),
)  # fmt: skip

FAMILIES = (*QWEN, *GEMMA, *PHI, *LLAMA_LIKE, *COHERE, *RESEARCH, *ROPE)
