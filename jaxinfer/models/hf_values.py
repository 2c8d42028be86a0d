"""What the values of a Hugging Face config may be, before any of them is used.

A config is written by hand or by other programs: a string for a number, a window of 0 or a null
epsilon must be an error that names the key, neither a crash in an innocent place nor a model that
quietly is another one. This module knows keys and kinds of values, no family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.errors import ModelError


@dataclass(frozen=True)
class Kind:
    """What a value has to be.

    Attributes:
        words: For messages, behind "must be".
        holds: Whether a value is of this kind.
    """

    words: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any, least: int, most: float | int = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, above: float | int = -math.inf) -> bool:
    # JSON has no infinity, but Python reads one.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > above


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(holds(entry) for entry in value)


# Damaged numbers must not ask for gigabytes: of what an int32 holds, a token; of a million, the
# frequency of a dimension; of ten thousand, a layer or an expert.
COUNT = Kind("a whole number from 1 to 2147483647", lambda v: _is_whole(v, 1, 2**31 - 1))
SIZE = Kind("a whole number from 1 to 1048576", lambda v: _is_whole(v, 1, 2**20))
FEW = Kind("a whole number from 1 to 10000", lambda v: _is_whole(v, 1, 10_000))
WHOLE = Kind("a whole number of at least 0", lambda v: _is_whole(v, 0))
NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a number above 0", lambda v: _is_number(v, above=0))
BASE = Kind("a number above 1", lambda v: _is_number(v, above=1))
PART = Kind("a number above 0 and up to 1", lambda v: _is_number(v, above=0) and v <= 1)
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
NAME = Kind("a name", lambda v: isinstance(v, str) and v != "")
TABLE = Kind("an object", lambda v: isinstance(v, Mapping))
LAYERS = Kind("a list of layers", lambda v: _is_list(v, lambda i: _is_whole(i, 0)))
BY_LAYER = Kind(
    "a list with 0 or 1 for each layer", lambda v: v != [] and _is_list(v, lambda i: i in (0, 1))
)
NAMES = Kind("a list of names", lambda v: v != [] and _is_list(v, NAME.holds))
DIVISORS = Kind("a list of numbers above 0", lambda v: v != [] and _is_list(v, POSITIVE.holds))


def _each(kind: Kind, *keys: str) -> dict[str, Kind]:
    return dict.fromkeys(keys, kind)


# These say nothing by being null. (A null window or soft-cap says that there is none.)
_NEVER_NULL: Mapping[str, Kind] = {
    **_each(COUNT, "decoder_sparse_step", "no_rope_layer_interval"),
    **_each(WHOLE, "first_k_dense_replace", "max_window_layers"),
    **_each(NUMBER, "attention_multiplier", "embedding_multiplier", "residual_multiplier"),
    **_each(NUMBER, "logit_scale", "routed_scaling_factor"),
    **_each(POSITIVE, "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"),
    **_each(POSITIVE, "logits_scaling", "query_pre_attn_scalar", "swiglu_limit"),
    **_each(BASE, "rotary_emb_base"),
    **_each(PART, "rotary_pct"),
    **_each(NAME, "hidden_act", "activation_function"),
}

_OR_NULL: Mapping[str, Kind] = {
    **_each(COUNT, "vocab_size", "max_position_embeddings", "n_positions", "sliding_window"),
    **_each(COUNT, "original_max_position_embeddings", "num_experts_per_tok", "moe_layer_freq"),
    **_each(COUNT, "sliding_window_pattern", "_sliding_window_pattern"),
    **_each(SIZE, "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"),
    **_each(SIZE, "num_attention_heads", "num_key_value_heads"),
    **_each(SIZE, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    **_each(SIZE, "q_lora_rank", "kv_lora_rank", "n_embd", "n_head", "n_inner"),
    **_each(FEW, "num_hidden_layers", "n_layer"),
    **_each(FEW, "num_experts", "num_local_experts", "n_routed_experts"),
    **_each(WHOLE, "n_shared_experts", "n_group", "topk_group"),
    **_each(POSITIVE, "attn_logit_softcapping", "final_logit_softcapping"),
    **_each(BASE, "rope_local_base_freq"),
    **_each(FLAG, "attention_bias", "mlp_bias", "lm_head_bias", "use_qkv_bias"),
    **_each(FLAG, "tie_word_embeddings", "use_sliding_window", "use_qk_norm", "qk_layernorm"),
    **_each(FLAG, "use_parallel_residual", "norm_topk_prob", "rope_interleave"),
    **_each(FLAG, "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    **_each(FLAG, "use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"),
    **_each(FLAG, "use_parallel_block", "use_gated_activation"),
    **_each(NAME, "hidden_activation"),
    **_each(NAMES, "layer_types"),
    **_each(BY_LAYER, "no_rope_layers"),
    **_each(LAYERS, "mlp_only_layers"),
    **_each(TABLE, "quantization_config", "rope_scaling", "rope_parameters"),
}

# Of rotary positions: in `rope_scaling`, in `rope_parameters`, and some of them outside.
_ROPE: Mapping[str, Kind] = {
    **_each(BASE, "rope_theta"),
    **_each(PART, "partial_rotary_factor"),
    **_each(NAME, "rope_type", "type"),
    **_each(POSITIVE, "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    **_each(POSITIVE, "attention_factor"),
    # 0 is a way to say that there is none.
    **_each(NUMBER, "mscale", "mscale_all_dim"),
    **_each(COUNT, "original_max_position_embeddings"),
    **_each(FLAG, "truncate"),
    **_each(DIVISORS, "factors", "short_factor", "long_factor"),
}
_OUTSIDE = ("rope_theta", "partial_rotary_factor")


def check_values(hf: Mapping[str, Any], except_for: Collection[str] = ()) -> None:
    """Raise for values that no model can have, whatever its family; keys not known here pass.

    Args:
        hf: The config.
        except_for: Keys that are not looked at.

    Raises:
        ModelError: All wrong values by name.
    """
    hf = {key: value for key, value in hf.items() if key not in except_for}
    kinds = {**_OR_NULL, **{key: _ROPE[key] for key in _OUTSIDE}}
    faults = [*_faults(hf, kinds), *_faults(hf, _NEVER_NULL, null=False)]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(hf.get(key), Mapping):
            faults += _rope_faults(hf[key], key)
    if faults:
        raise ModelError(f"config.json: {'; '.join(faults)}. Correct it, or fetch it again")


def _faults(
    values: Mapping[str, Any], kinds: Mapping[str, Kind], *, null: bool = True, inside: str = ""
) -> Iterator[str]:
    for key, kind in kinds.items():
        value = values.get(key)
        if key in values and not (kind.holds(value) or (null and value is None)):
            yield f"{inside}{key} must be {kind.words}, got {value!r:.80}"


def _rope_faults(settings: Mapping[str, Any], name: str) -> Iterator[str]:
    yield from _faults(settings, _ROPE, inside=f"{name}.")
    for key, value in settings.items():
        # Some families have one for each kind of layer.
        if isinstance(value, Mapping):
            yield from _faults(value, _ROPE, inside=f"{name}.{key}.")
