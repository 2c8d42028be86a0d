"""What a family of models is: a config translation and a table of weights. Data, no arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from jaxinfer.models.config import ModelConfig

Join = Callable[[ModuleType, Sequence[Any], ModelConfig], Any]
"""`join(xp, parts, config)`: several HF tensors → one parameter, output axes first. `xp` is numpy,
or jax.numpy when only shapes are asked for."""


def only(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """The one tensor as it is."""
    (part,) = parts
    return part


def stack(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """Equal tensors on a new first axis: gate and up become [2, F, ...]."""
    return xp.stack(parts)


def group_heads(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """Query, key and value rows, grouped by KV head: [K, G + 2, H, ...].

    A KV head thereby stands beside the queries that use it, and a shard of K is whole.
    """
    K, H = config.num_key_value_heads, config.head_dim
    return xp.concatenate([p.reshape(K, -1, H, *p.shape[1:]) for p in parts], axis=1)


@dataclass(frozen=True)
class Weight:
    """Where one parameter's values come from.

    Attributes:
        target: Path of the parameter in the model, `{i}` for the layer.
        sources: HF tensor names.
        join: Makes one array of them.
        input_major: HF stores projections [out, in], we store [in, out]: move the last axis first.
        when: The parameter exists only if this holds of the config.
    """

    target: str
    sources: tuple[str, ...]
    join: Join = only
    input_major: bool = False
    when: Callable[[ModelConfig], bool] = lambda _: True

    def assemble(self, xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
        """Return the parameter's values from those of `sources`."""
        joined = self.join(xp, parts, config)
        return xp.moveaxis(joined, -1, 0) if self.input_major else joined


@dataclass(frozen=True, kw_only=True)
class Family:
    """A set of checkpoints that one translation covers.

    Attributes:
        name: For people.
        architectures: HF `architectures` entries it serves.
        model_types: HF `model_type` values it serves, for configs without architectures.
        config: HF config → `ModelConfig`; raises `ModelError` for what it cannot honour.
        weights: One entry per parameter.
        ignored: Suffixes of tensors that may be present and carry nothing.
        examples: Checkpoints that people know, for the table of `jaxinfer models`.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], ModelConfig]
    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    examples: tuple[str, ...] = ()
