"""Reading Hugging Face configs: the keys that most families share, and what nobody here can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxinfer.errors import ModelError
from jaxinfer.models.config import ModelConfig
from jaxinfer.nn.norm import NormConfig
from jaxinfer.nn.rope_scaling import ROPE_TYPES, RopeConfig, RopeScaling

_ORIGINAL = "original_max_position_embeddings"
_ROPE_ALIASES = {"su": "longrope"}
_ROPE_IGNORED = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}


def decoder_config(hf: Mapping[str, Any], **family: Any) -> ModelConfig:
    """Translate the keys that most configs spell as Llama's does; `family` adds and overrides.

    Raises:
        ModelError: Keys are missing, or ask for what is not implemented.
    """
    refuse_unsupported(hf)
    vocab, hidden, intermediate, layers, heads, positions = require(
        hf,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    head_dim = family.pop("head_dim", None) or hf.get("head_dim") or hidden // heads
    if "ropes" not in family:
        family["ropes"] = (rope_from_hf(hf, head_dim),) * layers
    positions = max([positions, *(_reach(rope) for rope in family["ropes"] if rope)])
    shared: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "hidden_act": hf.get("hidden_act", "silu"),
        "norm": NormConfig(eps=float(hf.get("rms_norm_eps", 1e-6))),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }
    return ModelConfig(**(shared | family))


def require(hf: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    """Return the named config values; all that are missing are reported at once."""
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}")
    return tuple(hf[name] for name in names)


def expect(hf: Mapping[str, Any], **values: Any) -> None:
    """Raise unless these keys are absent, None, or say what the family implements."""
    wrong = [
        f"{name}={hf[name]!r} (implemented: {value!r})"
        for name, value in values.items()
        if hf.get(name) is not None and hf[name] != value
    ]
    if wrong:
        raise ModelError(f"config.json asks for what is not supported: {', '.join(wrong)}")


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raise for settings that change the arithmetic and that no family here implements."""
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"quantization_config: method {method!r} is not supported; use an unquantized or GGUF "
            "version of the model"
        )
    expect(
        hf, use_bidirectional_attention=False, is_encoder_decoder=False, add_cross_attention=False
    )


def projection_biases(hf: Mapping[str, Any]) -> dict[str, bool]:
    """`attention_bias` as most families mean it: of all four projections."""
    bias = bool(hf.get("attention_bias", False))
    return {"attention_bias": bias, "attention_output_bias": bias}


def windows_from_layer_types(layer_types: Iterable[str], window: int | None) -> tuple:
    """Return each layer's window by HF's names for kinds of layers."""
    kinds = {"sliding_attention": window, "full_attention": None}
    layer_types = tuple(layer_types)
    unknown = sorted(set(layer_types) - set(kinds))
    if unknown:
        raise ModelError(f"layer_types: {', '.join(unknown)} not supported; known: {list(kinds)}")
    if window is None and "sliding_attention" in layer_types:
        raise ModelError(
            "layer_types has sliding_attention, but no sliding_window is set or in use"
        )
    return tuple(kinds[kind] for kind in layer_types)


def alternating_windows(hf: Mapping[str, Any], period: int, window: int | None) -> tuple:
    """Windows by `layer_types`, or, where it is missing, none in every `period`-th layer."""
    (layers,) = require(hf, "num_hidden_layers")
    kinds = ("sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers))
    return windows_from_layer_types(hf.get("layer_types") or kinds, window)


def rope_from_hf(
    hf: Mapping[str, Any],
    head_dim: int,
    *,
    settings: Mapping[str, Any] | None = None,
    rope_theta: float = 10000.0,
    partial_rotary_factor: float = 1.0,
    interleaved: bool = False,
) -> RopeConfig:
    """Read the rotary positions: `rope_theta` and `rope_scaling`, or `rope_parameters`.

    Args:
        hf: The config.
        head_dim: H.
        settings: In place of `rope_parameters`, for configs with several.
        rope_theta: The family's default.
        partial_rotary_factor: The family's default: which part of a head is rotated.
        interleaved: See `RopeConfig`.

    Raises:
        ModelError: The type is unknown, lacks a value or has one that nobody knows.
    """
    if settings is None:
        settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    part = (
        settings.get("partial_rotary_factor")
        or hf.get("partial_rotary_factor")
        or partial_rotary_factor
    )
    return RopeConfig(
        rope_theta=float(settings.get("rope_theta") or hf.get("rope_theta") or rope_theta),
        rotary_dim=int(head_dim * part),
        interleaved=interleaved,
        scaling=_scaling_from_hf(hf, settings),
    )


def _scaling_from_hf(hf: Mapping[str, Any], settings: Mapping[str, Any]) -> RopeScaling:
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    rope_type = _ROPE_ALIASES.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"rope type {rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}"
        )
    needed, optional = ROPE_TYPES[rope_type]
    values = {name: value for name, value in settings.items() if value is not None}
    (positions,) = require(hf, "max_position_embeddings")
    outside = hf.get("original_max_position_embeddings")
    values.setdefault(_ORIGINAL, outside or positions)
    if rope_type == "dynamic":
        values[_ORIGINAL] = positions
    if rope_type == "longrope":
        # Phi says it twice, and means the one outside.
        values[_ORIGINAL] = outside or values[_ORIGINAL]
        values.setdefault("factor", positions / values[_ORIGINAL])
    require(values, *needed)
    # What most configs carry along and few types read.
    known = {*needed, *optional, *_ROPE_IGNORED, _ORIGINAL}
    unknown = sorted(set(values) - known - ({"factor"} if values.get("factor") == 1 else set()))
    if unknown:
        raise ModelError(f"rope type {rope_type!r}: {', '.join(unknown)} not supported")
    used = {name: _typed(name, values[name]) for name in (*needed, *optional) if name in values}
    return RopeScaling(rope_type=rope_type, **used)


def _typed(name: str, value: Any) -> Any:
    """JSON does not tell 8 from 8.0."""
    if isinstance(value, list | tuple):
        return tuple(float(x) for x in value)
    if isinstance(value, bool) or name == _ORIGINAL:
        return value
    return float(value)


def _reach(rope: RopeConfig) -> int:
    """Positions up to which a dynamic stretch lets a model go."""
    scaling = rope.scaling
    if scaling.rope_type != "dynamic":
        return 0
    return int(scaling.original_max_position_embeddings * scaling.factor)
