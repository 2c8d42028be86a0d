"""What a decoder is made of. Families translate a Hugging Face config into this record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.errors import ModelError
from jaxinfer.nn.mlp import ACTIVATIONS
from jaxinfer.nn.rope import ROPE_TYPES, RopeScaling


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder. Names are the HF config's; hashable, static under jit.

    Attributes:
        sliding_windows: Per layer, the keys a token sees (itself included), None for all.
        attention_bias: Biases of the query, key and value projections.
        attention_output_bias: Bias of the attention output projection.
        max_position_embeddings: The longest context that the model was made for.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if self.hidden_act not in ACTIVATIONS:
            raise ModelError(
                f"hidden_act {self.hidden_act!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even to be rotated, got {self.head_dim}")
        scaling = self.rope_scaling
        if scaling.factors and len(scaling.factors) != self.head_dim // 2:
            raise ModelError(
                f"rope factors: expected {self.head_dim // 2} for head_dim {self.head_dim}, "
                f"got {len(scaling.factors)}"
            )

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer, None for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None


def require(hf: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    """Return the named config values; all that are missing are reported at once."""
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}")
    return tuple(hf[name] for name in names)


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raise for settings that change the arithmetic and that no family here implements."""
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"quantization_config: method {method!r} is not supported; use an unquantized or GGUF "
            "version of the model"
        )


def rope_from_hf(
    hf: Mapping[str, Any], default_theta: float = 10000.0
) -> tuple[float, RopeScaling]:
    """Read base and scaling from either spelling: `rope_theta` + `rope_scaling`, `rope_parameters`.

    Raises:
        ModelError: The scaling's type is unknown, or it lacks a value.
    """
    settings = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = settings.pop("rope_theta", None) or hf.get("rope_theta") or default_theta
    rope_type = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"rope type {rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}"
        )
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        "explicit_factors": ("factors",),
    }[rope_type]
    values = dict(zip(needed, require(settings, *needed), strict=True))
    if "factors" in values:
        values["factors"] = tuple(float(x) for x in values["factors"])
    return float(theta), RopeScaling(rope_type=rope_type, **values)
