"""What a family of models is: a config translation and a table of weights. Data, no arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.hf_values import check_values

Join = Callable[[ModuleType, Sequence[Any], ModelConfig], Any]
"""`join(xp, parts, config)`: several HF tensors → one parameter, output axes first. `xp` is numpy,
or jax.numpy when only shapes are asked for."""


def only(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """The one tensor as it is."""
    (part,) = parts
    return part


def transposed(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """Of a layer that stores [in, out], as GPT-2's do."""
    (part,) = parts
    return part.T


def stack(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """Equal tensors on a new first axis: gate and up become [2, F, ...]."""
    return xp.stack(parts)


def group_heads(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """Query, key and value rows, grouped by KV head: [K, G + 2, H, ...].

    A KV head thereby stands beside the queries that use it, and a shard of K is whole.
    """
    K, H = config.num_key_value_heads, config.head_dim
    return xp.concatenate([p.reshape(K, -1, H, *p.shape[1:]) for p in parts], axis=1)


def split_heads(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """One tensor of all query rows, then all key rows, then all value rows: as `group_heads`."""
    (fused,) = parts
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return group_heads(xp, xp.split(fused, [N * H, (N + K) * H]), config)


def split_halves(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """One tensor of all gate rows, then all up rows: as `stack`."""
    (fused,) = parts
    return fused.reshape(2, -1, *fused.shape[1:])


@dataclass(frozen=True)
class Weight:
    """Where one parameter's values come from.

    Attributes:
        target: Path of the parameter in the model, `{i}` for the layer.
        sources: HF tensor names, `{i}` for the layer. One with `{head}`, `{kv_head}` or `{expert}`
            stands for as many as there are.
        join: Makes one array of them.
        input_major: HF stores projections [out, in], we store [in, out]: move the last axis first.
        when: The parameter exists only if this holds of the config.
        in_layer: And only in the layers of which this holds.
        packed: The sources are whole numbers that stand for others; `join` decodes them.
    """

    target: str
    sources: tuple[str, ...]
    join: Join = only
    input_major: bool = False
    when: Callable[[ModelConfig], bool] = lambda _: True
    in_layer: Callable[[ModelConfig, int], bool] = lambda config, layer: True
    packed: bool = False

    def assemble(self, xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
        """Return the parameter's values from those of `sources`."""
        joined = self.join(xp, parts, config)
        return xp.moveaxis(joined, -1, 0) if self.input_major else joined


def projection(
    target: str,
    *stems: str,
    join: Join = only,
    bias: Callable[[ModelConfig], bool] = lambda _: False,
    when: Callable[[ModelConfig], bool] = lambda _: True,
    in_layer: Callable[[ModelConfig, int], bool] = lambda config, layer: True,
) -> tuple[Weight, ...]:
    """A `Linear`, of HF modules named `stems`: its kernel and, if the config says so, its bias."""
    kernels, biases = (tuple(f"{stem}.{x}" for stem in stems) for x in ("weight", "bias"))
    return (
        Weight(f"{target}.kernel", kernels, join, input_major=True, when=when, in_layer=in_layer),
        Weight(
            f"{target}.bias", biases, join, when=lambda c: when(c) and bias(c), in_layer=in_layer
        ),
    )


def norm(
    target: str, stem: str, when: Callable[[ModelConfig], bool] = lambda _: True
) -> tuple[Weight, ...]:
    """A `Norm`, of the HF module `stem`: its scale and, if the config says so, its bias."""
    return (
        Weight(f"{target}.scale", (f"{stem}.weight",), when=when),
        Weight(f"{target}.bias", (f"{stem}.bias",), when=lambda c: when(c) and c.norm.bias),
    )


def experts(stem: str, *, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """The experts of a `MoE`, each with HF modules of its own; `stem` has `{expert}`."""
    return tuple(
        Weight(
            f"layers.{{i}}.mlp.{target}",
            (f"{stem}{source}.weight",),
            _stack_experts,
            in_layer=ModelConfig.is_routed,
        )
        for target, source in (("gate", gate), ("up", up), ("down", down))
    )


def _stack_experts(xp: ModuleType, parts: Sequence[Any], config: ModelConfig) -> Any:
    """One [out, in] of each expert: [E, in, out]."""
    return xp.moveaxis(xp.stack(parts), 2, 1)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A set of checkpoints that one translation covers.

    Attributes:
        name: For people.
        architectures: HF `architectures` entries it serves.
        model_types: HF `model_type` values it serves, for configs without architectures.
        config: HF config → `ModelConfig`; raises `ModelError` for what it cannot honour. It may
            rely on what `translate` has checked.
        weights: One entry per parameter.
        ignored: Suffixes of tensors that may be present and carry nothing.
        drafts: One more layer may be present, which is left out (multi-token prediction).
        optional_prefix: What some checkpoints put before every tensor's name.
        own_keys: Config keys that mean something else here than elsewhere: their values are
            checked by nobody but `config`.
        examples: Checkpoints that people know, for the table of `jaxinfer models`.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], ModelConfig]
    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    drafts: bool = False
    optional_prefix: str = ""
    own_keys: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    def translate(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Return what a HF config of this family describes.

        Raises:
            ModelError: Values are of the wrong kind or missing, or ask for what is not implemented.
        """
        check_values(hf, except_for=self.own_keys)
        return self.config(hf)
