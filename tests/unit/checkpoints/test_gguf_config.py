import numpy as np
import pytest

from checkpoints import CorruptFileError, UnknownArchitectureError, open_checkpoint
from checkpoints.gguf_architectures import ARCHITECTURES
from tests.unit.checkpoints import tiny_models as tiny


def config_of(tmp_path, arch="llama", extra_tensors=None, **keys):
    tensors = {"token_embd.weight": np.ones((tiny.VOCAB, tiny.HIDDEN), np.float32)}
    tensors |= extra_tensors or {}
    return open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", tensors, arch, keys)).config


EXPERT_KEYS = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 24,
    "attention.kv_lora_rank": 16,
    "attention.key_length_mla": 2 * tiny.HEAD_DIM,
    "attention.value_length_mla": tiny.HEAD_DIM,
}


def required_keys(arch):
    return {f"{arch}.{k}": v for k, v in EXPERT_KEYS.items() if ARCHITECTURES[arch].required}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_common_keys_of_every_architecture(tmp_path, arch):
    config = config_of(tmp_path, arch, **required_keys(arch))
    assert config["model_type"] == ARCHITECTURES[arch].model_type
    shared = {key: value for key, value in tiny.CONFIG.items() if key in config}
    del shared["architectures"], shared["model_type"]
    if ARCHITECTURES[arch].latent_attention:
        shared["num_key_value_heads"] = tiny.HEADS
        assert config["qk_rope_head_dim"] == config["qk_nope_head_dim"] == tiny.HEAD_DIM
    else:
        assert config["head_dim"] == tiny.HEAD_DIM
    assert {key: config[key] for key in shared} == shared
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_head_dim_may_differ_from_hidden_over_heads(tmp_path):
    config = config_of(tmp_path, "qwen3", **{"qwen3.attention.key_length": 128})
    assert config["head_dim"] == 128


def test_a_window_makes_a_llama_a_mistral(tmp_path):
    config = config_of(tmp_path, **{"llama.attention.sliding_window": 32})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    assert config["architectures"] == ["MistralForCausalLM"]


def test_llama3_scaling_arrives_as_explicit_factors(tmp_path):
    factors = np.array([1, 1, 1, 1, 2, 4, 8, 8], np.float32)
    config = config_of(tmp_path, extra_tensors={"rope_freqs.weight": factors})
    assert config["rope_scaling"] == {
        "rope_type": "explicit_factors",
        "factors": factors.tolist(),
    }


def test_linear_and_yarn_scaling(tmp_path):
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = config_of(tmp_path, **keys)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.yarn_beta_fast": 32.0,
    }
    assert config_of(tmp_path, **keys)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
    }


@pytest.mark.parametrize("keys", [{}, {"type": "none"}, {"type": "linear", "factor": 1.0}])
def test_no_scaling(tmp_path, keys):
    keys = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    assert "rope_scaling" not in config_of(tmp_path, **keys)


def test_phi3_long_rope_factors_and_partial_rotation(tmp_path):
    long, short = np.full(6, 2, np.float32), np.ones(6, np.float32)
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    keys = {
        "phi3.rope.dimension_count": 12,
        "phi3.rope.scaling.original_context_length": 32,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    config = config_of(tmp_path, "phi3", tensors, **keys)
    assert config["partial_rotary_factor"] == 0.75
    assert config["original_max_position_embeddings"] == 32
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "attention_factor": 1.25,
    }


def test_gemma3_attends_globally_in_every_sixth_layer(tmp_path):
    keys = {"gemma3.attention.sliding_window": 8, "gemma3.block_count": 13}
    config = config_of(tmp_path, "gemma3", **keys)
    is_global = [kind == "full_attention" for kind in config["layer_types"]]
    assert is_global == [i in (5, 11) for i in range(13)]
    assert config["query_pre_attn_scalar"] == tiny.HEAD_DIM
    assert config["rope_local_base_freq"] == 10000.0


def test_gemma2_alternates_and_caps(tmp_path):
    keys = {
        "gemma2.attention.sliding_window": 8,
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
    }
    config = config_of(tmp_path, "gemma2", **keys)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)


def test_a_pattern_in_the_file_wins(tmp_path):
    keys = {
        "gemma3.attention.sliding_window": 8,
        "gemma3.attention.sliding_window_pattern": [False, True],
    }
    config = config_of(tmp_path, "gemma3", **keys)
    assert config["layer_types"] == ["full_attention", "sliding_attention"]


def test_gemmas_27b_models_scale_queries_by_width_over_heads(tmp_path):
    keys = {"gemma2.block_count": 46, "gemma2.attention.key_length": 128}
    assert config_of(tmp_path, "gemma2", **keys)["query_pre_attn_scalar"] == 16


def test_equal_values_per_layer_are_one_value(tmp_path):
    assert (
        config_of(tmp_path, **{"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    )
    with pytest.raises(UnknownArchitectureError, match="differs from layer to layer"):
        config_of(tmp_path, **{"llama.feed_forward_length": [8, 16]})


def test_missing_keys_are_listed_all_at_once(tmp_path):
    keys = {"llama.embedding_length": None, "llama.block_count": 0, "llama.context_length": "x"}
    with pytest.raises(CorruptFileError) as error:
        config_of(tmp_path, **keys)
    assert "llama.embedding_length is missing" in str(error.value)
    assert "llama.block_count must be a positive number, got 0" in str(error.value)
    assert "llama.context_length must be a positive number, got 'x'" in str(error.value)


def test_a_window_makes_an_olmo2_an_olmo3(tmp_path):
    config = config_of(tmp_path, "olmo2", **{"olmo2.attention.sliding_window": 32})
    assert (config["model_type"], config["architectures"]) == ("olmo3", ["Olmo3ForCausalLM"])


def test_what_experts_need_is_listed_all_at_once(tmp_path):
    with pytest.raises(CorruptFileError, match=r"expert_count is missing.*length is missing"):
        config_of(tmp_path, "qwen3moe")


@pytest.mark.parametrize(
    ("gating", "model_type", "method"),
    [(None, "deepseek_v2", "greedy"), (1, "deepseek_v2", "greedy"), (2, "deepseek_v3", "noaux_tc")],
)
def test_the_gating_function_tells_the_versions_of_deepseek_apart(
    tmp_path, gating, model_type, method
):
    keys = required_keys("deepseek2") | {"deepseek2.expert_gating_func": gating}
    config = config_of(tmp_path, "deepseek2", **keys)
    assert (config["model_type"], config["topk_method"]) == (model_type, method)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"expert_gating_func": 7}, UnknownArchitectureError, "expert_gating_func is 7"),
        ({"rope.dimension_count": 99}, CorruptFileError, "smaller than the first"),
        ({"attention.value_length_mla": None}, CorruptFileError, "value_length_mla"),
        ({"expert_weights_norm": 3}, CorruptFileError, "must be true or false, got 3"),
        ({"expert_count": 0.5}, CorruptFileError, "expert_count must be a positive number"),
    ],
)
def test_a_deepseek_that_makes_no_sense_is_refused(tmp_path, keys, error, message):
    keys = required_keys("deepseek2") | {f"deepseek2.{k}": v for k, v in keys.items()}
    with pytest.raises(error, match=message):
        config_of(tmp_path, "deepseek2", **keys)


def test_deepseeks_older_files_say_sizes_of_heads_without_mla(tmp_path):
    keys = required_keys("deepseek2")
    for key in ("key_length", "value_length"):
        keys[f"deepseek2.attention.{key}"] = keys.pop(f"deepseek2.attention.{key}_mla")
    config = config_of(tmp_path, "deepseek2", **keys)
    assert config["qk_nope_head_dim"] == config["v_head_dim"] == tiny.HEAD_DIM
    assert "head_dim" not in config
