"""What describes one family's checkpoint: its `config.json` and how its weights are drawn.

It knows no family, no torch and no file but the names of keys that every `config.json` here has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tiny import BOS, EOS, PAD, VOCAB_SIZE

ORIGINAL_LENGTH = 60
"""Of the RoPE variants whose frequencies depend on the length of the sequence: prompts of 5 and 24
tokens stay below it with 32 more, `crossing` (49) crosses it while generating, `long` (72) is past
it from the start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One checkpoint.

    Attributes:
        name: Its folder, and its golden file's stem.
        config: `config.json` beyond the common part of `hf_config`, spelled as the released
            checkpoints of the family spell it.
        teeth: Changes of the configuration that must move the logits: what they switch off is
            proven to matter. A key with dots reaches into nested dictionaries.
        dtype: Of the stored weights.
        embed_std: Of the embedding's entries; None for what suits a Llama body.
        post_norm: Range of the weights of norms named "post": larger ones where they scale what
            a layer adds, so that it outweighs the embedding.
        plus_one: True where norms multiply by `1 + weight`.
        rename: Prefixes of weight names as transformers has them, and as the file shall.
        depends_on_length: True where RoPE's frequencies change with the length of the sequence, so
            that a cached run of the reference is no run of its uncached self.
        mxfp4: True to store the experts' matrices as MXFP4 blocks and scales.
    """

    name: str
    config: dict[str, Any]
    teeth: Sequence[dict[str, Any]] = ()
    dtype: str = "bfloat16"
    embed_std: float | None = None
    post_norm: tuple[float, float] = (0.5, 1.5)
    plus_one: bool = False
    rename: Sequence[tuple[str, str]] = ()
    depends_on_length: bool = False
    mxfp4: bool = False


def hf_config(family: Family) -> dict[str, Any]:
    # GPT-2 has its own word for it, and would be given two.
    length = {} if "n_positions" in family.config else {"max_position_embeddings": 256}
    return {
        "architectures": family.config["architectures"],
        "model_type": family.config["model_type"],
        "vocab_size": VOCAB_SIZE,
        **length,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": family.dtype,
    } | family.config


def shape(
    hidden: int, heads: int, kv_heads: int, ff: int, layers: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        **more,
    }


def llama_like(architecture: str, model_type: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        **shape(*dims, **more),
    }


def changed(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with the values of `change`, whose keys may have dots."""
    config = dict(config)
    for key, value in change.items():
        head, _, rest = key.partition(".")
        config[head] = changed(config[head], {rest: value}) if rest else value
    return config
