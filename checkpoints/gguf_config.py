"""GGUF metadata → the config that HF would have written for the same model.

Knows metadata keys and tensor shapes; reads no weights (RoPE factors are handed in).
"""

from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CorruptFileError, UnknownArchitectureError
from checkpoints.gguf_architectures import (
    ARCHITECTURES,
    COMMON_KEYS,
    EXPERT_VARIANTS,
    GgufArchitecture,
)
from checkpoints.gguf_attention import add_latent, add_rope, add_windows, is_positive

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
_ZERO_IS_NONE |= {"topk_group", "routed_scaling_factor", "q_lora_rank"}

# Lists are made of this length: a damaged number must not ask for gigabytes.
_MAX_LAYERS = 10_000

_TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
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
        add_latent(config, metadata, arch, row, shapes, path)
    add_rope(config, metadata, arch, row, rope_factors)
    add_windows(config, metadata, arch, row, path)
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
        elif not is_positive(value, whole=hf_key not in _REAL):
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
        if f"{arch}.{key}" in metadata and not is_positive(metadata[f"{arch}.{key}"], whole)
    ]
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if not isinstance(kind, str):
        faults.append(f"{arch}.rope.scaling.type must be a string, got {kind!r}")
    return faults


def _uniform(value: Any, key: str, path: object) -> Any:
    # Some converters write one value per layer even when all are equal.
    if not isinstance(value, list):
        return value
    if not value or any(v != value[0] for v in value):
        raise UnknownArchitectureError(
            f"{path}: {key} differs from layer to layer ({value}); such models are not read yet"
        )
    return value[0]
