"""Cases: whole steps of real models for H100, with the kernels inside, and what is wrong with them.

The backbone is the one that serves: `StepPrograms` over weights and a cache that exist only as
shapes. What is looked for holds of each layer alike, so two layers stand for all of them; the full
depth takes minutes and is left to the slow tests.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxinfer.kv_cache import KVCache, make_cache
from jaxinfer.models import Transformer, flat_parameters
from jaxinfer.models.llama import llama_config
from jaxinfer.runner_config import RunnerConfig, cache_shape
from jaxinfer.sharding import logical, parameter_shardings, replicated
from jaxinfer.step_programs import StepPrograms
from pallas_kernels.aot import Case, Program
from pallas_kernels.aot.matrix import PREFILL, WRITE

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
TOKENS = {"decode": 64, "prefill": 2048}
NUM_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model on some chips.

    Attributes:
        name: Of the model.
        hf: Its config.
        devices: Chips that share each layer.
        num_pages: What fits beside the weights.
    """

    name: str
    hf: Mapping[str, Any]
    devices: int
    num_pages: int


SETUPS = (
    Setup(name="Llama-3-8B", hf=LLAMA_8B, devices=1, num_pages=24_576),
    Setup(name="Llama-3-70B", hf=LLAMA_70B, devices=8, num_pages=65_536),
)


@dataclass(frozen=True)
class Step:
    """A backbone of some token bucket, lowered when it is asked for."""

    programs: StepPrograms
    tokens: int

    def lower(self) -> jax.stages.Lowered:
        return self.programs.compiled.lower(("backbone", self.tokens))


def cases() -> list[Case]:
    """Two layers by default; "full depth" for the slow tests."""
    return [
        case_of(setup, kind, layers)
        for setup in SETUPS
        for kind in TOKENS
        for layers in (NUM_LAYERS, setup.hf["num_hidden_layers"])
    ]


def case_of(setup: Setup, kind: str, layers: int) -> Case:
    def build(mesh: Mesh) -> Program:
        programs, cache = abstract_programs(setup, mesh, layers)
        return Program(
            Step(programs, TOKENS[kind]), (), lambda compiled: facts(compiled, programs, cache)
        )

    full = layers == setup.hf["num_hidden_layers"]
    return Case(
        name=f"{setup.name} {kind}, {'full depth' if full else f'{layers} layers'}",
        build=build,
        kernels=(PREFILL, "paged_decode", WRITE),
        chips=("h100",),
        num_devices=setup.devices,
        default=not full,
    )


def abstract_programs(
    setup: Setup,
    mesh: Mesh,
    layers: int = NUM_LAYERS,
    shard: Callable[[str, NamedSharding], NamedSharding] = lambda _, sharding: sharding,
) -> tuple[StepPrograms, KVCache]:
    """Return the programs and the cache of a model; `shard` may change a weight's sharding."""
    config = RunnerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=max(TOKENS.values()),
        max_model_len=8192,
        num_pages=setup.num_pages,
        page_size=16,
        max_logprobs=5,
        dtype=jnp.dtype(jnp.bfloat16),
        attention_impl="pallas",
    )
    model_config = llama_config({**setup.hf, "num_hidden_layers": layers})
    model = nnx.eval_shape(lambda: Transformer(model_config, jnp.bfloat16))
    _, state = nnx.split(model)
    parameters = flat_parameters(state)
    shardings = parameter_shardings(mesh, parameters)
    weights = {
        path: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shard(path, shardings[path]))
        for path, p in parameters.items()
    }
    shape = cache_shape(model_config, config.windows, config.page_size, config.page_dtype)
    cache = jax.eval_shape(lambda: make_cache(shape, config.group_pages, (None, None)))
    cache = KVCache(
        placed(cache.layers, logical(mesh, None, "kv_heads")),
        placed(cache.token_ids, replicated(mesh)),
    )
    return StepPrograms(model, weights, mesh, config, cache), cache


def placed(tree: Any, sharding: NamedSharding) -> Any:
    """Return the same shapes with a sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def facts(compiled: jax.stages.Compiled, programs: StepPrograms, cache: KVCache) -> dict[str, Any]:
    """Return what a compiled backbone does with memory and with the other devices.

    All bytes are those of one device.
    """
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    return {
        "cache_bytes": sum(shard_bytes(cache)),
        "page_array_bytes": max(shard_bytes(cache)),
        "weight_bytes": sum(shard_bytes(programs.backbone.abstract)),
        "whole_weight_bytes": sum(x.size * x.dtype.itemsize for x in programs.backbone.abstract),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "collectives": collectives(text),
        "largest_copy_bytes": max(copies(text), default=0),
    }


def problems(found: Mapping[str, Any], *, layers: int, full_layers: int, devices: int) -> list[str]:
    """Return what a step must not do and does.

    Args:
        found: Facts.
        layers: That the program has.
        full_layers: That the model has. Temporaries do not grow with depth, the cache does.
        devices: That share the model.
    """
    wrong = []
    page_array, temp = found["page_array_bytes"], found["temp_bytes"]
    if found["alias_bytes"] < found["cache_bytes"]:
        wrong.append("the cache is not updated in place")
    if temp > 0.05 * found["cache_bytes"] * full_layers / layers or temp >= page_array:
        wrong.append(f"temporaries of {temp:,} bytes have room for pages of a layer")
    if found["largest_copy_bytes"] > page_array // 100:
        wrong.append(f"a copy of {found['largest_copy_bytes']:,} bytes")
    # Attention output and MLP output of each layer, and the embedding.
    expected = {"all-reduce": 2 * layers + 1} if devices > 1 else {}
    if found["collectives"] != expected:
        wrong.append(f"collectives {found['collectives']} instead of {expected}")
    # Norms are whole on each device; the rest is divided.
    share = 1.01 * found["whole_weight_bytes"] / devices
    if found["argument_bytes"] - found["cache_bytes"] > share + 2**20:
        wrong.append("weights are not divided among the devices")
    return wrong


def shard_bytes(tree: Any) -> list[int]:
    """Return what one device holds of each array."""
    return [
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    ]


def collectives(hlo: str) -> dict[str, int]:
    """Return how many collectives of each kind a program has."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return dict(Counter(re.findall(rf" ({kinds})(?:-start)?\(", hlo)))


def copies(hlo: str) -> list[int]:
    """Return the bytes of every copy in a program, those inside fusions included."""
    found = re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* (?:\S+ )*?copy(?:-start)?\(", hlo)
    return [_element_bytes(dtype) * math.prod(_sizes(dims)) for dtype, dims in found]


def _sizes(dims: str) -> list[int]:
    return [int(size) for size in dims.split(",") if size]


def _element_bytes(dtype: str) -> int:
    """From HLO's name of a dtype: "bf16" → 2, "f8e4m3fn" → 1, "pred" → 1."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1
