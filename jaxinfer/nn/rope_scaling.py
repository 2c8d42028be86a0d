"""How models stretch their rotary frequencies. Host arithmetic in float64; nothing is traced."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A stretch of the context. Names are the HF config's; each type reads what `ROPE_TYPES` says.

    Attributes:
        rope_type: A key of `ROPE_TYPES`.
        factor: Stretch of the context.
        original_max_position_embeddings: Context length of the pre-training.
        low_freq_factor: Wavelengths above `original / low_freq_factor` are stretched.
        high_freq_factor: Wavelengths below `original / high_freq_factor` are kept.
        beta_fast: Frequencies that turn more often than this in `original` positions are kept.
        beta_slow: Those that turn less often than this are stretched.
        truncate: Round the two bounds to whole frequencies.
        mscale: With `mscale_all_dim`, another way to say `attention_factor`.
        mscale_all_dim: See `mscale`.
        attention_factor: Multiplies rotated queries and keys; None for the type's own rule.
        factors: One divisor per frequency, as GGUF stores them.
        short_factor: Divisors for contexts of up to `original` positions.
        long_factor: Divisors for longer ones.
    """

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


_ORIGINAL = "original_max_position_embeddings"
_YARN_OPTIONS = (
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)

ROPE_TYPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # type: (what it needs, what it may have)
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", _ORIGINAL), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (("factor", _ORIGINAL), _YARN_OPTIONS),
    "longrope": (("short_factor", "long_factor", "factor", _ORIGINAL), ("attention_factor",)),
    "explicit_factors": (("factors",), ("attention_factor",)),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The rotary positions of a layer.

    Attributes:
        rope_theta: Base of the frequencies.
        rotary_dim: How many of a head's dimensions are rotated; the others pass.
        interleaved: Pairs are (x[2i], x[2i + 1]), as in GPT-J, instead of (x[i], x[i + H / 2]).
        scaling: How the frequencies are stretched.
    """

    rope_theta: float = 10000.0
    rotary_dim: int
    interleaved: bool = False
    scaling: RopeScaling = field(default_factory=RopeScaling)

    def for_length(self, max_model_len: int) -> RopeConfig:
        """Settle what depends on the length of the context, by the longest that is served.

        Cached keys stay as they were rotated, so one set of frequencies has to serve a sequence
        from its first token to its last. (transformers decides anew for every forward pass.)
        """
        scaling = self.scaling
        original = scaling.original_max_position_embeddings
        match scaling.rope_type:
            case "longrope":
                return dataclasses.replace(self, scaling=_settle_longrope(scaling, max_model_len))
            case "dynamic":
                stretch = scaling.factor * max(max_model_len, original) / original
                exponent = self.rotary_dim / (self.rotary_dim - 2)
                theta = self.rope_theta * (stretch - (scaling.factor - 1)) ** exponent
                return dataclasses.replace(self, rope_theta=theta, scaling=RopeScaling())
        return self

    def inverse_frequencies(self) -> np.ndarray:
        """Return float64 [rotary_dim / 2]: radians per position of each rotated pair."""
        dim, scaling = self.rotary_dim, self.scaling
        inv_freq = self.rope_theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        match scaling.rope_type:
            case "default":
                return inv_freq
            case "linear":
                return inv_freq / scaling.factor
            case "explicit_factors":
                return inv_freq / np.asarray(scaling.factors, np.float64)
            case "llama3":
                return inv_freq * _blend(_llama3_kept(inv_freq, scaling), scaling.factor)
            case "yarn":
                return inv_freq * _blend(_yarn_kept(self), scaling.factor)
        raise NotImplementedError(
            f"rope_type {scaling.rope_type!r} has no frequencies before `for_length` settles it"
        )

    @property
    def attention_factor(self) -> float:
        """What multiplies rotated queries and keys."""
        scaling = self.scaling
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if scaling.rope_type != "yarn":
            return 1.0
        if scaling.mscale and scaling.mscale_all_dim:
            above = _yarn_scale(scaling.factor, scaling.mscale)
            return above / _yarn_scale(scaling.factor, scaling.mscale_all_dim)
        return _yarn_scale(scaling.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """What multiplies the scores in DeepSeek's use of YaRN, beyond `attention_factor`."""
        scaling = self.scaling
        if scaling.rope_type != "yarn" or not scaling.mscale_all_dim:
            return 1.0
        return _yarn_scale(scaling.factor, scaling.mscale_all_dim) ** 2


def _settle_longrope(scaling: RopeScaling, max_model_len: int) -> RopeScaling:
    """LongRoPE (arXiv:2402.13753): one list of divisors up to the original length, one beyond."""
    original = scaling.original_max_position_embeddings
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        stretch = max(scaling.factor, 1.0)
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original))
    return RopeScaling(
        rope_type="explicit_factors",
        factors=scaling.long_factor if max_model_len > original else scaling.short_factor,
        attention_factor=attention_factor,
    )


def _blend(kept: np.ndarray, factor: float) -> np.ndarray:
    """Multipliers of the frequencies: 1 where `kept` is 1, 1 / factor where it is 0."""
    return kept + (1 - kept) / factor


def _llama3_kept(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's rule: keep short wavelengths, stretch long ones, blend between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    return np.clip((turns - low) / (high - low), 0.0, 1.0)


def _yarn_kept(rope: RopeConfig) -> np.ndarray:
    """YaRN (arXiv:2309.00071, section 3.2): the same between indices instead of wavelengths."""
    dim, scaling = rope.rotary_dim, rope.scaling

    def index(turns: float) -> float:
        """Index of the frequency that turns so often within the original context."""
        positions_per_turn = scaling.original_max_position_embeddings / turns
        return dim * math.log(positions_per_turn / (2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float64) - low) / max(high - low, 0.001)
    return 1 - np.clip(ramp, 0.0, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
