"""GGUF metadata → what HF's config says of attention: rotation, windows, DeepSeek's latents.

Adds to a config whose plain keys are there already; reads no weights.
"""

import math
from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CorruptFileError, UnknownArchitectureError
from checkpoints.gguf_architectures import GgufArchitecture

# GGUF key under `rope.scaling.` → HF key in `rope_scaling`, for YaRN.
_YARN_KEYS = {
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}

# Values of `expert_gating_func`.
_SOFTMAX, _SIGMOID = 1, 2


def is_positive(value: Any, whole: bool) -> bool:
    """Whether a metadata value is a positive number, and a whole one if asked."""
    kinds = int if whole else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < math.inf


def add_latent(
    config: dict[str, Any],
    metadata: Mapping[str, Any],
    arch: str,
    row: GgufArchitecture,
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
    if not all(is_positive(size, whole=True) for size in sizes) or rotated >= key_length:
        raise CorruptFileError(
            f"{path}: {arch}.attention.key_length_mla, {arch}.attention.value_length_mla and "
            f"{arch}.rope.dimension_count must be positive numbers, the last smaller than the "
            f"first, got {sizes}. Convert the model again with a current llama.cpp"
        )
    del config["head_dim"]
    corrected = any(name.endswith(".exp_probs_b.bias") for name in shapes)
    scoring = metadata.get(f"{arch}.expert_gating_func")
    scoring = scoring or (_SIGMOID if corrected else _SOFTMAX)
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
        _rename(config, row.sigmoid_as)
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    else:
        grouped = config.get("n_group", 1) > 1
        config["scoring_func"] = "softmax"
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"


def add_rope(
    config: dict[str, Any],
    metadata: Mapping[str, Any],
    arch: str,
    row: GgufArchitecture,
    rope_factors: Mapping[str, list[float]],
) -> None:
    """Which part of a head is rotated, and how far the context is stretched."""
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
            if row.latent_attention and is_positive(scaling.get("yarn_log_multiplier"), False):
                # A tenth of it is stored, rounded to float32; released models have two equal ones.
                mscale = round(scaling["yarn_log_multiplier"] * 10, 6)
                config["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}


def add_windows(
    config: dict[str, Any],
    metadata: Mapping[str, Any],
    arch: str,
    row: GgufArchitecture,
    path: object,
) -> None:
    """What queries are scaled by, and which layers have a window."""
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
        elif is_positive(pattern, whole=True):
            windowed = [(i + 1) % pattern > 0 for i in layers]
        else:
            raise CorruptFileError(
                f"{path}: {arch}.attention.sliding_window_pattern must be a positive number or "
                f"one flag for each of {len(layers)} layers, got {pattern!r:.80}"
            )
        config["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in windowed
        ]
    if config["sliding_window"] is not None:
        _rename(config, row.windowed_as)


def _rename(config: dict[str, Any], name: tuple[str, str] | None) -> None:
    if name is not None:
        config |= {"model_type": name[0], "architectures": [name[1]]}
