"""What a model takes of each device beside its KV pages, known before any weight is read.

Weights are counted exactly, by the shardings that serving uses; temporaries are estimated. Knows
shapes only: no checkpoint, no device.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import EngineConfig
from jaxinfer.models import ModelConfig, Recipe, Transformer, flat_parameters
from jaxinfer.quant import operate
from jaxinfer.sharding import MESH_AXES, divide_experts, parameter_shardings


def abstract_model(
    model_config: ModelConfig, dtype: Any, quantization: str | None = None, kernels: str = "xla"
) -> tuple[Transformer, list[Recipe]]:
    """Return a model without weights, and how those that it has instead of others are made."""
    model = nnx.eval_shape(lambda: Transformer(model_config, dtype))
    return model, operate(model, dtype=dtype, quantization=quantization, kernels=kernels)


def abstract_mesh(tensor_parallel_size: int, expert_parallel: int) -> jax.sharding.AbstractMesh:
    """Return the mesh of one replica without its devices."""
    sizes = (1, expert_parallel, tensor_parallel_size // expert_parallel)
    return jax.sharding.AbstractMesh(sizes, MESH_AXES)


def one_layer_of_each_kind(config: ModelConfig) -> tuple[ModelConfig, Mapping[int, int]]:
    """Return a model of the first layer of each kind; which these are, and of how many each."""
    kinds: dict[Any, int] = {}
    counts: dict[int, int] = {}
    for i in range(config.num_hidden_layers):
        first = kinds.setdefault((config.rope_of(i), config.window_of(i), config.is_routed(i)), i)
        counts[first] = counts.get(first, 0) + 1

    def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[i] for i in counts) if values else ()

    reduced = dataclasses.replace(
        config,
        num_hidden_layers=len(counts),
        ropes=of(config.ropes),
        sliding_windows=of(config.sliding_windows),
        moe_layers=of(config.moe_layers),
    )
    return reduced, counts


def num_parameters(model_config: ModelConfig) -> int:
    """Return the numbers of a checkpoint, in all."""
    reduced, layers = one_layer_of_each_kind(model_config.as_stored())
    parameters = flat_parameters(nnx.state(abstract_model(reduced, jnp.bfloat16)[0]))
    return sum(_copies(path, layers) * math.prod(p.shape) for path, p in parameters.items())


def weight_bytes(config: EngineConfig, model_config: ModelConfig) -> Mapping[str, int]:
    """Return bytes of one device by kind of weight.

    Args:
        config: With a `dtype` that is resolved.
        model_config: With heads laid out for the devices.
    """
    mesh: Any = abstract_mesh(config.tensor_parallel_size, config.expert_parallel)
    kernels = "cpu" if config.kernels == "cpu" else "xla"
    # Building 80 layers takes seconds, and they are alike.
    reduced, layers = one_layer_of_each_kind(model_config)
    model, _ = abstract_model(reduced, config.dtype, config.quantization, kernels)
    divide_experts(model, mesh)
    parameters = flat_parameters(nnx.state(model))
    found: dict[str, int] = {}
    for path, sharding in parameter_shardings(mesh, parameters).items():
        p = parameters[path]
        held = math.prod(sharding.shard_shape(p.shape)) * p.dtype.itemsize
        found[_kind(path)] = found.get(_kind(path), 0) + _copies(path, layers) * held
    return found


def estimated_temporaries(config: EngineConfig, model_config: ModelConfig) -> Mapping[str, int]:
    """Return rough bytes by program: a layer's widest arrays, the sampler's passes over logits."""
    n, itemsize = config.tensor_parallel_size, jnp.dtype(config.dtype).itemsize
    T, B, D = config.max_num_batched_tokens, config.max_num_seqs, model_config.hidden_size
    N, H = model_config.num_attention_heads, model_config.head_dim
    heads = 3 * N * H / n
    wide = 2 * model_config.intermediate_size / n
    if model_config.moe is not None:
        moe = model_config.moe
        shards = n // config.expert_parallel
        visits = moe.num_experts_per_tok * (2 * moe.intermediate_size / shards + 2 * D)
        wide = max(wide, visits)
    # Sums are float32 before they are rounded.
    backbone = T * (4 * D * itemsize + max(heads, wide) * (4 + itemsize))
    # Logits, weights, times and random bits of the vocabulary's share.
    sampler = 6 * 4 * B * model_config.vocab_size / n
    return {"backbone": int(backbone), "sampler": int(sampler)}


def _copies(path: str, layers: Mapping[int, int]) -> int:
    """For how many layers a path of the reduced model stands."""
    found = re.match(r"layers\.(\d+)\.", path)
    return list(layers.values())[int(found[1])] if found else 1


def _kind(path: str) -> str:
    """Which kind of weight a path names, for the table."""
    if path.startswith(("embed", "lm_head", "positions")):
        return "embedding and head"
    if ".attention." in path:
        return "attention"
    if re.search(r"\.mlp\.(gate|up|down)(_bias)?$", path):
        return "experts"
    return "feed-forward" if ".mlp." in path else "norms"
