"""GGUF metadata → the config that HF would have written for the same model.

Knows metadata keys and tensor shapes; reads no weights (RoPE factors are handed in).
"""

import math
from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CorruptFileError, UnknownArchitectureError
from checkpoints.gguf_architectures import (
    ARCHITECTURES,
    COMMON_KEYS,
    EXPERT_VARIANTS,
    GgufArchitecture,
)

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
)

# The other values are whole numbers.
_REAL = {
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "clip_qkv",
    "routed_scaling_factor",
}

# Zero is a way to say that there is none.
_ZERO_IS_NONE = {"sliding_window", "first_k_dense_replace", "n_shared_experts", "n_group"}
_ZERO_IS_NONE |= {"topk_group", "routed_scaling_factor"}

_SOFTMAX, _SIGMOID = 1, 2

# Lists are made of this length: a damaged number must not ask for gigabytes.
_MAX_LAYERS = 10_000

_TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}

# GGUF key under `rope.scaling.` → HF key in `rope_scaling`, for YaRN.
_YARN_KEYS = {
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def architecture_of(metadata: Mapping[str, Any], path: object) -> tuple[str, GgufArchitecture]:
    """The architecture's GGUF name and its row.

    Raises:
        UnknownArchitectureError: No row fits.
        CorruptFileError: The file does not say.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CorruptFileError(
            f"{path}: expected the metadata key general.architecture, got {name!r}; "
            "the file is not a language model"
        )
    if name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{path} holds a model of architecture {name!r}; known are "
            f"{', '.join(ARCHITECTURES)}. To add one, see docs/howto/add-a-model.md"
        )
    row = ARCHITECTURES[name]
    if metadata.get(f"{name}.expert_count") and "expert_count" not in row.extra_keys:
        if name in EXPERT_VARIANTS:
            return name, EXPERT_VARIANTS[name]
        raise UnknownArchitectureError(
            f"{path} holds a mixture-of-experts variant of {name!r}, which is not read yet; "
            "use a dense model"
        )
    return name, row


def to_hf_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, list[float]],
    path: object,
) -> dict[str, Any]:
    """The config in HF's keys.

    Args:
        metadata: All keys of the file.
        shapes: GGUF tensor name → row-major shape.
        rope_factors: Values of those `ROPE_TENSORS` that the file has.
        path: For messages.

    Raises:
        UnknownArchitectureError: No row of the table fits.
        CorruptFileError: Needed keys are missing or of the wrong type (all of them listed).
    """
    arch, row = architecture_of(metadata, path)
    config: dict[str, Any] = {
        "architectures": [row.class_name],
        "model_type": row.model_type,
        "_name_or_path": str(metadata.get("general.name", "")),
        "rope_theta": 10000.0,
        **row.constants,
        **_mapped_values(metadata, arch, row, path),
    }
    config |= {hf: metadata[key] for key, hf in _TOKEN_IDS.items() if key in metadata}
    config["vocab_size"] = shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    first = {name.removeprefix("blk.0.") for name in shapes if name.startswith("blk.0.")}
    config |= {key: tensor in first for key, tensor in row.present.items()}
    config |= {key: tensor not in first for key, tensor in row.absent.items()}
    config.setdefault("attention_bias", "blk.0.attn_q.bias" in shapes)
    config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if row.latent_attention:
        _add_latent(config, metadata, arch, shapes, path)
    _add_rope(config, metadata, arch, row, rope_factors)
    _add_attention_kind(config, metadata, arch, row, path)
    return config | {alias: config[key] for key, alias in row.aliases.items() if key in config}


def _mapped_values(
    metadata: Mapping[str, Any], arch: str, row: GgufArchitecture, path: object
) -> dict[str, Any]:
    values, faults = {}, []
    required = {*_REQUIRED, *row.norm_keys.values(), *row.required}
    for key, hf_key in {**COMMON_KEYS, **row.norm_keys, **row.extra_keys}.items():
        value = _uniform(metadata.get(f"{arch}.{key}"), f"{arch}.{key}", path)
        if value is None or (value == 0 and hf_key in _ZERO_IS_NONE):
            if hf_key in required:
                faults.append(f"{arch}.{key} is missing")
        elif not _is_positive(value, whole=hf_key not in _REAL):
            faults.append(f"{arch}.{key} must be a positive number, got {value!r}")
        else:
            values[hf_key] = value
    for key, hf_key in row.flags.items():
        value = metadata.get(f"{arch}.{key}")
        if isinstance(value, bool):
            values[hf_key] = value
        elif value is not None:
            faults.append(f"{arch}.{key} must be true or false, got {value!r}")
    faults += _rope_faults(metadata, arch)
    if values.get("num_hidden_layers", 0) > _MAX_LAYERS:
        faults.append(f"{arch}.block_count is {values['num_hidden_layers']}, over {_MAX_LAYERS}")
    if values.get("num_attention_heads", 0) > values.get("hidden_size", 0) and not faults:
        faults.append(f"{arch}.attention.head_count exceeds {arch}.embedding_length")
    if faults:
        raise CorruptFileError(
            f"{path}: {'; '.join(faults)}. Convert the model again with a current llama.cpp"
        )
    return values


def _rope_faults(metadata: Mapping[str, Any], arch: str) -> list[str]:
    expected = {
        "rope.dimension_count": True,
        "rope.scaling.original_context_length": True,
        "rope.scaling.factor": False,
        "rope.scale_linear": False,
    }
    faults = [
        f"{arch}.{key} must be a positive number, got {metadata[f'{arch}.{key}']!r}"
        for key, whole in expected.items()
        if f"{arch}.{key}" in metadata and not _is_positive(metadata[f"{arch}.{key}"], whole)
    ]
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if not isinstance(kind, str):
        faults.append(f"{arch}.rope.scaling.type must be a string, got {kind!r}")
    return faults


def _is_positive(value: Any, whole: bool) -> bool:
    kinds = int if whole else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < math.inf


def _uniform(value: Any, key: str, path: object) -> Any:
    # Some converters write one value per layer even when all are equal.
    if not isinstance(value, list):
        return value
    if not value or any(v != value[0] for v in value):
        raise UnknownArchitectureError(
            f"{path}: {key} differs from layer to layer ({value}); such models are not read yet"
        )
    return value[0]


def _add_latent(
    config: dict[str, Any],
    metadata: Mapping[str, Any],
    arch: str,
    shapes: Mapping[str, tuple[int, ...]],
    path: object,
) -> None:
    """DeepSeek's head sizes and its way to choose experts; which version it is, too."""
    # The keys without `_mla` mean heads as well in files that hold `attn_kv_b`.
    key_length = metadata.get(f"{arch}.attention.key_length_mla", config["head_dim"])
    value_length = metadata.get(
        f"{arch}.attention.value_length_mla", metadata.get(f"{arch}.attention.value_length")
    )
    rotated = metadata.get(f"{arch}.rope.dimension_count")
    sizes = (key_length, value_length, rotated)
    if not all(_is_positive(size, whole=True) for size in sizes) or rotated >= key_length:
        raise CorruptFileError(
            f"{path}: {arch}.attention.key_length_mla, {arch}.attention.value_length_mla and "
            f"{arch}.rope.dimension_count must be positive numbers, the last smaller than the "
            f"first, got {sizes}. Convert the model again with a current llama.cpp"
        )
    del config["head_dim"]
    corrected = any(name.endswith(".exp_probs_b.bias") for name in shapes)
    scoring = metadata.get(f"{arch}.expert_gating_func", _SIGMOID if corrected else _SOFTMAX)
    if scoring not in (_SOFTMAX, _SIGMOID):
        raise UnknownArchitectureError(
            f"{path}: {arch}.expert_gating_func is {scoring!r}; known are {_SOFTMAX} (softmax) "
            f"and {_SIGMOID} (sigmoid)"
        )
    config |= {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": value_length,
        # The file has the one of the latent.
        "num_key_value_heads": config["num_attention_heads"],
    }
    config.setdefault("q_lora_rank", None)
    if scoring == _SIGMOID:
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    else:
        grouped = config.get("n_group", 1) > 1
        config["scoring_func"] = "softmax"
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"


def _add_rope(
    config: dict[str, Any],
    metadata: Mapping[str, Any],
    arch: str,
    row: GgufArchitecture,
    rope_factors: Mapping[str, list[float]],
) -> None:
    if not row.latent_attention:
        rotated = metadata.get(f"{arch}.rope.dimension_count", config["head_dim"])
        if row.partial_rotation or rotated != config["head_dim"]:
            config["partial_rotary_factor"] = rotated / config["head_dim"]
    prefix = f"{arch}.rope.scaling."
    scaling = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    original = scaling.get("original_context_length")
    if original is not None:
        config["original_max_position_embeddings"] = original
    if "rope_freqs.weight" in rope_factors:
        # Llama 3's scaling arrives as its result: one divisor per rotated pair.
        config["rope_scaling"] = {
            "rope_type": "explicit_factors",
            "factors": rope_factors["rope_freqs.weight"],
        }
    elif {"rope_factors_long.weight", "rope_factors_short.weight"} <= rope_factors.keys():
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": rope_factors["rope_factors_long.weight"],
            "short_factor": rope_factors["rope_factors_short.weight"],
        }
        if "attn_factor" in scaling:
            config["rope_scaling"]["attention_factor"] = scaling["attn_factor"]
    else:
        factor = scaling.get("factor", metadata.get(f"{arch}.rope.scale_linear"))
        kind = scaling.get("type", "none" if factor is None else "linear")
        if kind == "none" or factor in (None, 0, 1):
            return
        config["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if original is not None:
            config["rope_scaling"]["original_max_position_embeddings"] = original
        # An unknown kind travels on as it is: the model layer refuses what it cannot do.
        keys = _YARN_KEYS if kind == "yarn" else {key: key for key in scaling}
        for key, hf_key in keys.items():
            if key in scaling and key not in ("type", "factor", "original_context_length"):
                config["rope_scaling"][hf_key] = scaling[key]
        if kind == "yarn":
            config["rope_scaling"] |= row.rope_constants
            if row.latent_attention and _is_positive(scaling.get("yarn_log_multiplier"), False):
                # A tenth of it is stored, rounded to float32; released models have two equal ones.
                mscale = round(scaling["yarn_log_multiplier"] * 10, 6)
                config["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}


def _add_attention_kind(
    config: dict[str, Any],
    metadata: Mapping[str, Any],
    arch: str,
    row: GgufArchitecture,
    path: object,
) -> None:
    if row.query_scale_layers is not None:
        wide = config["num_hidden_layers"] == row.query_scale_layers
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
        )
    if "sliding_window" not in config:
        config["sliding_window"] = None
    elif row.sliding_pattern:
        layers = range(config["num_hidden_layers"])
        pattern = metadata.get(f"{arch}.attention.sliding_window_pattern", row.sliding_pattern)
        if isinstance(pattern, list) and len(pattern) == len(layers):
            windowed = [bool(flag) for flag in pattern]
        elif _is_positive(pattern, whole=True):
            windowed = [(i + 1) % pattern > 0 for i in layers]
        else:
            raise CorruptFileError(
                f"{path}: {arch}.attention.sliding_window_pattern must be a positive number or "
                f"one flag for each of {len(layers)} layers, got {pattern!r:.80}"
            )
        config["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in windowed
        ]
    if row.windowed_as and config["sliding_window"] is not None:
        model_type, class_name = row.windowed_as
        config |= {"model_type": model_type, "architectures": [class_name]}
