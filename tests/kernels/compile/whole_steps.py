"""Cases: whole steps of real models for H100, with the kernels inside.

The backbone is the one that serves: `StepPrograms` over abstract weights and an abstract cache. What
is looked for holds of each layer alike, so a few layers stand for all of them; the full depth takes
minutes and is compiled by the slow tests.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.kv_cache import KVCache, make_cache
from jaxinfer.models import Transformer, flat_parameters
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.llama import llama_config
from jaxinfer.sharding import logical, parameter_shardings, replicated
from jaxinfer.step_programs import RunnerConfig, StepPrograms, cache_shape
from pallas_kernels.aot import Case, Program

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
SEQUENCES = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192}


@dataclass(frozen=True)
class Step:
    """A step program that is lowered when it is asked for."""

    programs: StepPrograms
    tokens: int

    def lower(self) -> jax.stages.Lowered:
        return self.programs.compiled.lower(("backbone", self.tokens))


def cases() -> list[Case]:
    """Few layers by default; "full depth" for the slow tests."""
    made = []
    for model, config, devices in (("8B", LLAMA_8B, 1), ("70B", LLAMA_70B, 8)):
        for kind, tokens in (("decode", 64), ("prefill", 2048)):
            for layers in (2, config["num_hidden_layers"]):
                full = layers == config["num_hidden_layers"]
                name = f"{model} {kind}, {'full depth' if full else f'{layers} layers'}"
                made.append(_case(name, config, layers, tokens, devices, default=not full))
    return made


def _case(
    name: str, hf: dict[str, Any], layers: int, tokens: int, devices: int, *, default: bool
) -> Case:
    def build(mesh: Mesh) -> Program:
        programs, cache = abstract_programs({**hf, "num_hidden_layers": layers}, mesh)
        return Program(Step(programs, tokens), (), lambda compiled: facts(compiled, cache))

    return Case(name=name, build=build, chips=("h100",), num_devices=devices, default=default)


def abstract_programs(
    hf: dict[str, Any], mesh: Mesh, impl: str = "pallas"
) -> tuple[StepPrograms, KVCache]:
    """Return the programs and the pages of a model; weights and pages are but shapes."""
    config = RunnerConfig(
        **SEQUENCES,
        num_pages=4096,
        page_size=16,
        max_logprobs=5,
        dtype=jnp.dtype(jnp.bfloat16),
        attention_impl=impl,
    )
    model_config: ModelConfig = llama_config(hf)
    model = nnx.eval_shape(lambda: Transformer(model_config, jnp.bfloat16))
    _, state = nnx.split(model)
    parameters = flat_parameters(state)
    shardings = parameter_shardings(mesh, parameters)
    weights = {
        path: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shardings[path])
        for path, p in parameters.items()
    }
    cache = abstract_cache(model_config, config, mesh)
    return StepPrograms(model, weights, mesh, config, cache), cache


def abstract_cache(model_config: ModelConfig, config: RunnerConfig, mesh: Mesh) -> KVCache:
    """Return the shapes of a cache with the shardings that it is served with."""
    shape = cache_shape(model_config, config.windows, config.page_size, config.dtype)
    cache = jax.eval_shape(lambda: make_cache(shape, config.group_pages, (None, None)))
    pages = logical(mesh, None, "kv_heads", None, None)

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = pages if x.ndim == 4 else replicated(mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(placed, cache)


def facts(compiled: jax.stages.Compiled, cache: KVCache) -> dict[str, Any]:
    """Return what a compiled backbone does with memory and with the other devices.

    All bytes are those of one device.
    """
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    leaves = jax.tree.leaves(cache)
    sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
    return {
        "cache_bytes": sum(sizes),
        "page_array_bytes": max(sizes),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "collectives": collectives(text),
        "largest_copy_bytes": max(copies(text), default=0),
    }


def collectives(hlo: str) -> dict[str, int]:
    """Return how many collectives of each kind a program has."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return dict(Counter(re.findall(rf" ({kinds})(?:-start)?\(", hlo)))


def copies(hlo: str) -> list[int]:
    """Return the bytes of every copy in a program, those inside fusions included."""
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(", hlo)
    return [
        _bytes_of(dtype) * math.prod(map(int, filter(None, d.split(",")))) for dtype, d in found
    ]


def _bytes_of(dtype: str) -> int:
    """Of an element, from HLO's name of the dtype: "bf16" → 2, "f8e4m3fn" → 1, "pred" → 1."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1
