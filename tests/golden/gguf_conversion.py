"""What llama.cpp's converter makes of a Hugging Face checkpoint, for the families it knows.

Written from its `conversion` package, with the names of the `gguf` package: the tables of
`checkpoints` are tested against it, so it shares nothing with them. All tensors are float32.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Config = Mapping[str, Any]
Arrays = dict[str, np.ndarray]

ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}


def write_gguf(path: Path, config: Config, weights: Arrays) -> Path:
    """Write `weights`, under Hugging Face names, as the converter would."""
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(path.stem)
    _add_common(writer, config)
    if add := _METADATA.get(config["model_type"]):
        add(writer, config)
    for key, write in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        write(config[key])
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(arch, layers)
    for name, array in _converted(config, weights).items():
        gguf_name = names.get_name(name, (".weight", ".bias"))
        assert gguf_name, f"gguf knows no name for {name}"
        if isinstance(array, _Blocks):
            writer.add_tensor(gguf_name, array.data, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Blocks:
    """Packed MXFP4."""

    def __init__(self, data: np.ndarray):
        self.data = data


# Tensors.


def _converted(config: Config, weights: Arrays) -> Mapping[str, Any]:
    result = _stack_experts(weights)
    return dict(
        pair
        for name, array in result.items()
        for pair in _CONVERSIONS.get(config["model_type"], _unchanged)(name, array, config, weights)
    )


def _stack_experts(weights: Arrays) -> Arrays:
    """Tensors numbered within their layer become one, without the number."""
    result, stacks = {}, {}
    for name, array in weights.items():
        if match := re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(\..*)", name):
            stacks.setdefault((match[1], match[3]), {})[int(match[2])] = array
        else:
            result[name] = array
    for (before, after), parts in stacks.items():
        name = before.removesuffix(".norms") + after
        # The map of names has what the converter says for Mixtral.
        name = re.sub(r"model\.(.*)\.block_sparse_moe\.", r"\1.feed_forward.", name)
        result[name] = np.stack([parts[i] for i in range(len(parts))])
    return result


Converted = Iterable[tuple[str, Any]]


def _unchanged(name: str, array: np.ndarray, config: Config, weights: Arrays) -> Converted:
    yield name, array


def _permuted(name: str, array: np.ndarray, config: Config, weights: Arrays) -> Converted:
    for projection, key in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        if f".{projection}_proj." in name:
            halves = array.reshape(config[key], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
    yield name, array


def _plus_one(name: str, array: np.ndarray, config: Config, weights: Arrays) -> Converted:
    yield name, array + np.float32(1) if name.endswith("norm.weight") else array


def _by_kind(name: str, array: np.ndarray, config: Config, weights: Arrays) -> Converted:
    if ".query_key_value." in name:
        heads = config["num_attention_heads"]
        by_head = array.reshape(heads, 3, config["hidden_size"] // heads, *array.shape[1:])
        array = np.concatenate([by_head[:, i].reshape(-1, *array.shape[1:]) for i in range(3)])
    yield name, array


def _transposed(name: str, array: np.ndarray, config: Config, weights: Arrays) -> Converted:
    yield name, array.T if ".c_" in name and array.ndim == 2 else array


def _gpt_oss(name: str, array: np.ndarray, config: Config, weights: Arrays) -> Converted:
    if name.endswith("sinks"):
        yield f"{name}.weight", array
    elif name.endswith("_bias") and "gate_up_proj" in name:
        yield name.replace("gate_up_proj_bias", "gate_proj.bias"), array[..., ::2]
        yield name.replace("gate_up_proj_bias", "up_proj.bias"), array[..., 1::2]
    elif name.endswith("down_proj_bias"):
        yield name.replace("down_proj_bias", "down_proj.bias"), array
    elif name.endswith("gate_up_proj"):
        yield name.replace("gate_up_proj", "gate_proj.weight"), array[..., ::2].swapaxes(1, 2)
        yield name.replace("gate_up_proj", "up_proj.weight"), array[..., 1::2].swapaxes(1, 2)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", array.swapaxes(1, 2)
    elif name.endswith("_blocks"):
        scales = weights[name.replace("_blocks", "_scales")]
        if "gate_up_proj" in name:
            for i, part in enumerate(("gate_proj", "up_proj")):
                new_name = name.replace("gate_up_proj_blocks", f"{part}.weight")
                yield new_name, _repacked(array[:, i::2], scales[:, i::2])
        else:
            yield name.replace("_blocks", ".weight"), _repacked(array, scales)
    elif not name.endswith("_scales"):
        yield name, array


def _repacked(blocks: np.ndarray, scales: np.ndarray) -> _Blocks:
    """Neighbours in a byte → numbers 16 apart in a byte, behind their scale."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    data = np.concatenate([scales[..., None], packed], axis=-1)
    return _Blocks(data.reshape(*data.shape[:2], -1))


def _deepseek(name: str, array: np.ndarray, config: Config, weights: Arrays) -> Converted:
    if name.endswith("kv_b_proj.weight"):
        sizes = config["qk_nope_head_dim"], config["v_head_dim"]
        by_head = array.reshape(config["num_attention_heads"], sum(sizes), -1)
        keys, values = by_head[:, : sizes[0]], by_head[:, sizes[0] :]
        yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), array


_CONVERSIONS: Mapping[str, Callable[..., Converted]] = {
    **dict.fromkeys(("llama", "mixtral", "smollm3", "granite"), _permuted),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _plus_one),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
    "gpt_neox": _by_kind,
    "gpt2": _transposed,
    "gpt_oss": _gpt_oss,
}


# Metadata.


def _add_common(writer: gguf.GGUFWriter, config: Config) -> None:
    def first(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    hidden = first("hidden_size", "n_embd")
    latent = config["model_type"].startswith("deepseek")
    for value, write in (
        (first("max_position_embeddings", "n_ctx"), writer.add_context_length),
        (hidden, writer.add_embedding_length),
        (first("num_hidden_layers", "n_layer"), writer.add_block_count),
        (first("intermediate_size") or 4 * hidden, writer.add_feed_forward_length),
        (first("num_attention_heads", "n_head"), writer.add_head_count),
        (1 if latent else first("num_key_value_heads"), writer.add_head_count_kv),
        (first("rope_theta"), writer.add_rope_freq_base),
        (first("rms_norm_eps"), writer.add_layer_norm_rms_eps),
        (first("layer_norm_eps", "layer_norm_epsilon"), writer.add_layer_norm_eps),
        (first("num_local_experts", "num_experts"), writer.add_expert_count),
        (first("num_experts_per_tok"), writer.add_expert_used_count),
        (first("n_group"), writer.add_expert_group_count),
        (first("topk_group"), writer.add_expert_group_used_count),
        (first("head_dim"), writer.add_key_length),
        (first("head_dim"), writer.add_value_length),
    ):
        if value is not None:
            write(value)
    if function := config.get("scoring_func"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[function.upper()])
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, write in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if key in rope:
                write(rope[key])


def _add_gemma2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _add_rotation(writer: gguf.GGUFWriter, config: Config, part: float) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_dimension_count(int(part * head_dim))


def _add_llama(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_vocab_size(config["vocab_size"])
    _add_rotation(writer, config, 1)


def _add_granite(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_llama(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _add_olmo(writer: gguf.GGUFWriter, config: Config) -> None:
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(kinds)


def _add_cohere(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _add_cohere2(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_cohere(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_vocab_size(config["vocab_size"])
    _add_rotation(writer, config, config["rotary_pct"])


def _add_stablelm(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_rotation(writer, config, config["partial_rotary_factor"])
    writer.add_parallel_residual(config.get("use_parallel_residual", True))


def _add_gpt_neox(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_rotation(writer, config, config["rotary_pct"])
    writer.add_parallel_residual(config["use_parallel_residual"])


def _add_qwen3_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_gpt_oss(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _add_deepseek(writer: gguf.GGUFWriter, config: Config) -> None:
    rotated = config["qk_rope_head_dim"]
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + rotated)
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_scaling"]["mscale_all_dim"])


_METADATA: Mapping[str, Callable[[gguf.GGUFWriter, Config], None]] = {
    "llama": _add_llama,
    "mixtral": _add_llama,
    "smollm3": _add_llama,
    "granite": _add_granite,
    "gemma2": _add_gemma2,
    "olmo2": _add_olmo,
    "olmo3": _add_olmo,
    "glm4": lambda writer, config: _add_rotation(writer, config, config["partial_rotary_factor"]),
    "cohere": _add_cohere,
    "cohere2": _add_cohere2,
    "stablelm": _add_stablelm,
    "gpt_neox": _add_gpt_neox,
    "qwen3_moe": _add_qwen3_moe,
    "gpt_oss": _add_gpt_oss,
    "deepseek_v2": _add_deepseek,
    "deepseek_v3": _add_deepseek,
}
