"""Attention heads for a number of devices that does not divide them: repeated, padded, or whole.

The rule, for N query heads behind K KV heads and n devices:

* n divides K: nothing to do.
* Else each KV head is stored r times, each copy for its share of the queries, and groups of zeros
  are appended until n divides the count. Of all r the one is taken that leaves a device the fewest
  KV heads, then the fewest query heads: 9 and 3 heads on 4 devices become 12 and 4; 64 and 8 on 16
  become 64 and 16.
* Latent attention has one KV head, which every device holds; its query heads are padded.
* A norm across all heads would count zeros: if it takes padding, every device holds all heads.

A head of zeros attends to nothing and adds nothing, so results are those of the checkpoint's heads.
Knows shapes only: no mesh, no file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig


@dataclass(frozen=True)
class HeadLayout:
    """How stored heads become those of the model.

    Attributes:
        repeats: Copies of each KV head.
        num_kv_heads: In all, zeros included.
        group: Queries that use each of them.
    """

    repeats: int
    num_kv_heads: int
    group: int

    @property
    def num_heads(self) -> int:
        """Query heads, zeros included."""
        return self.num_kv_heads * self.group


def lay_out_heads(config: ModelConfig, num_shards: int) -> ModelConfig:
    """Return the same model with heads that so many devices can share; itself if it has them.

    What cannot be laid out stays as it is, and every device then holds all heads.
    """
    config = config.as_stored()
    N, K = config.num_attention_heads, config.num_key_value_heads
    if config.latent is not None:
        num_heads, num_kv_heads = _up_to(N, num_shards), K
    elif K % num_shards == 0:
        num_heads, num_kv_heads = N, K
    else:
        layout = _best_layout(N, K, num_shards)
        if config.qk_norm == "across_heads" and layout.num_kv_heads > K * layout.repeats:
            return config
        num_heads, num_kv_heads = layout.num_heads, layout.num_kv_heads
    if (num_heads, num_kv_heads) == (N, K):
        return config
    return dataclasses.replace(
        config,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        stored_heads=(N, K),
    )


def relayout(config: ModelConfig, path: str, values: Any) -> Any:
    """Return a parameter with the heads of `config`, from one with those of its checkpoint.

    Args:
        config: As `lay_out_heads` returned it.
        path: Dotted path of the parameter; those that have no heads come back as they are.
        values: numpy, jax, or what `numpy`'s functions accept.
    """
    if config.stored_heads is None or ".attention." not in path:
        return values
    xp = jnp if isinstance(values, jax.Array) else np
    name = path.rpartition("attention.")[2]
    N, K = config.stored_heads
    latent = config.latent is not None
    layout = (
        HeadLayout(1, config.num_attention_heads, 1)
        if latent
        else HeadLayout(
            _repeats(config),
            config.num_key_value_heads,
            config.num_attention_heads // config.num_key_value_heads,
        )
    )
    match name:
        case "qkv.kernel":
            return _groups(xp, values, layout, axis=1)
        case "qkv.bias":
            return _groups(xp, values, layout, axis=0)
        case "output.kernel":
            by_head = xp.reshape(values, (N, values.shape[0] // N, values.shape[1]))
            padded = _pad(xp, by_head, layout.num_heads, axis=0)
            return xp.reshape(padded, (-1, values.shape[1]))
        case "sinks":
            return _pad(xp, values, layout.num_heads, axis=0)
        case "q_norm.scale" if values.ndim == 2:
            return _pad(xp, values, layout.num_heads, axis=0)
        case "k_norm.scale" if values.ndim == 2:
            repeated = xp.repeat(values, layout.repeats, axis=0)
            return _pad(xp, repeated, layout.num_kv_heads, axis=0)
        case "query.kernel":
            return _pad(xp, values, layout.num_heads, axis=1)
        case "key_up" | "value_up":
            return _pad(xp, values, layout.num_heads, axis=0)
    return values


def _best_layout(N: int, K: int, num_shards: int) -> HeadLayout:
    group = N // K
    layouts = [
        HeadLayout(repeats, _up_to(K * repeats, num_shards), group // repeats)
        for repeats in range(1, group + 1)
        if group % repeats == 0
    ]
    return min(layouts, key=lambda x: (x.num_kv_heads, x.num_heads, x.repeats))


def _repeats(config: ModelConfig) -> int:
    assert config.stored_heads is not None
    N, K = config.stored_heads
    return (N // K) // (config.num_attention_heads // config.num_key_value_heads)


def _groups(xp: Any, values: Any, layout: HeadLayout, axis: int) -> Any:
    """Lay out [..., K, G + 2, H]: its queries are divided among the copies of key and value."""
    before, (K, G, H) = values.shape[:axis], values.shape[axis:]
    queries, others = xp.split(values, [G - 2], axis=axis + 1)
    queries = xp.reshape(queries, (*before, K * layout.repeats, layout.group, H))
    others = xp.repeat(others, layout.repeats, axis=axis)
    groups = xp.concatenate([queries, others], axis=axis + 1)
    return _pad(xp, groups, layout.num_kv_heads, axis=axis)


def _pad(xp: Any, values: Any, count: int, axis: int) -> Any:
    """Append zeros along an axis up to a count."""
    missing = count - values.shape[axis]
    if not missing:
        return values
    shape = (*values.shape[:axis], missing, *values.shape[axis + 1 :])
    return xp.concatenate([values, xp.zeros(shape, values.dtype)], axis=axis)


def _up_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
