"""What a model takes of each device's memory, told without the devices and without its weights.

Weights and pages are counted exactly, by the shardings that serving uses. Temporaries are those of
compiled programs where a compiler for the devices is installed (`jaxinfer.plan_compile`), else an
estimate, and labelled so.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.memory import DEVICE_SHARE
from jaxinfer.model_source import ModelSource, abstract_model
from jaxinfer.models import ModelConfig, family_of, flat_parameters, lay_out_heads
from jaxinfer.presets import PRESETS
from jaxinfer.resolution import runner_config
from jaxinfer.runner_config import RunnerConfig, cache_shape
from jaxinfer.sharding import (
    MESH_AXES,
    check_experts,
    costs,
    divide_experts,
    page_sharding,
    parameter_shardings,
)
from pallas_kernels.aot import CHIPS


@dataclass(frozen=True)
class Topology:
    """Devices of one kind.

    Attributes:
        chip: Name in `pallas_kernels.aot.CHIPS`.
        count: How many.
    """

    chip: str
    count: int

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read "h100:8".

        Raises:
            ConfigError: It is something else.
        """
        found = re.fullmatch(r"([a-z0-9_]+):([1-9]\d*)", text)
        if not found or found[1] not in CHIPS:
            raise ConfigError(
                f"topology must be CHIP:COUNT with a chip of {', '.join(CHIPS)}, such as h100:8; "
                f"got {text!r}"
            )
        return cls(found[1], int(found[2]))

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return CHIPS[self.chip].memory_bytes


@dataclass(frozen=True, kw_only=True)
class Temporaries:
    """What programs need while they run, in bytes of one device.

    Attributes:
        by_program: By program.
        compiled: Whether a compiler said so; else it is an estimate.
        note: What is to be known about them.
    """

    by_program: Mapping[str, int]
    compiled: bool
    note: str

    @property
    def largest(self) -> int:
        """Programs run one after the other."""
        return max(self.by_program.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device, unless a name says otherwise.

    Attributes:
        model: Name that was asked for.
        topology: Devices.
        tensor_parallel_size: Devices that share a layer.
        expert_parallel: Of these, devices that divide the experts.
        replicas: Engines that the devices have room for.
        dtype: Of weights and activations.
        kv_cache_dtype: Of pages.
        num_parameters: Of the checkpoint, in all.
        weight_bytes: By kind of weight.
        temporaries: What programs need.
        page_bytes: Of a page of tokens, over all layers.
        page_size: Tokens of a page.
        num_pages: That fit, or that were asked for.
        max_model_len: Longest sequence.
        memory_bytes: That a device has.
        costs: What odd sizes cost, in words.
    """

    model: str
    topology: Topology
    tensor_parallel_size: int
    expert_parallel: int
    replicas: int
    dtype: str
    kv_cache_dtype: str
    num_parameters: int
    weight_bytes: Mapping[str, int]
    temporaries: Temporaries
    page_bytes: int
    page_size: int
    num_pages: int
    max_model_len: int
    memory_bytes: int
    costs: tuple[str, ...]

    @property
    def total_weight_bytes(self) -> int:
        return sum(self.weight_bytes.values())

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def free_bytes(self) -> int:
        """Negative if it does not fit."""
        used = self.total_weight_bytes + self.cache_bytes + self.temporaries.largest
        return self.memory_bytes - used

    @property
    def fits(self) -> bool:
        """Whether a sequence of full length can be served."""
        return self.free_bytes >= 0 and self.num_pages * self.page_size >= self.max_model_len

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            **asdict(self),
            "total_weight_bytes": self.total_weight_bytes,
            "cache_bytes": self.cache_bytes,
            "cached_tokens": self.num_pages * self.page_size,
            "free_bytes": self.free_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model and the shapes it would be served with.

    Attributes:
        config: Settings, resolved as far as the plan needs.
        model_config: Sizes, heads laid out.
        shapes: What the runner would serve; `num_pages` is not yet known.
    """

    config: EngineConfig
    model_config: ModelConfig
    shapes: RunnerConfig


def config_of(name: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name and HF-style config: a preset's, a `config.json`'s or a checkpoint's.

    Raises:
        ConfigError, checkpoints.CheckpointError: There is none.
    """
    if name in PRESETS:
        return name, PRESETS[name]
    path = Path(name).expanduser() if name else None
    if path is not None:
        file = path / "config.json" if path.is_dir() else path
        if file.name.endswith(".json") and file.is_file():
            try:
                return str(name), json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{file} is not JSON: {error}") from error
    source = ModelSource.open(name)
    return name or str(source.path), source.config


def plan_model(config: EngineConfig, hf: Mapping[str, Any], topology: Topology) -> PlannedModel:
    """Decide how a model would lie on the devices.

    Raises:
        ConfigError: Settings and devices do not go together.
        ModelError: The config is of no model that is supported.
    """
    model_config = family_of(hf).translate(hf)
    size = config.tensor_parallel_size
    if size == 1:
        size = topology.count
    if topology.count % size:
        raise ConfigError(
            f"tensor_parallel_size={size} must divide the {topology.count} devices of the topology"
        )
    experts = config.expert_parallel
    if experts == 1 and model_config.moe is not None:
        experts = math.gcd(model_config.moe.num_experts, size)
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    config = dataclasses.replace(
        config,
        tensor_parallel_size=size,
        expert_parallel=experts,
        dtype=dtype,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=config.max_model_len or model_config.max_position_embeddings,
        num_pages=config.num_pages or 1,
    )
    if config.quantization is not None:
        raise ConfigError("quantization is not supported on several devices yet; leave it out")
    check_experts(model_config, size, experts)
    assert config.max_model_len and config.num_pages
    model_config = lay_out_heads(model_config, size).for_length(config.max_model_len)
    # All layers are counted as those without a window: what they could need at most.
    shapes = dataclasses.replace(runner_config(config, model_config), windows=())
    return PlannedModel(config=config, model_config=model_config, shapes=shapes)


def abstract_mesh(tensor_parallel_size: int, expert_parallel: int) -> jax.sharding.AbstractMesh:
    """Return the mesh of one replica without its devices."""
    sizes = (1, expert_parallel, tensor_parallel_size // expert_parallel)
    return jax.sharding.AbstractMesh(sizes, MESH_AXES)


def make_plan(
    name: str, planned: PlannedModel, topology: Topology, temporaries: Temporaries
) -> MemoryPlan:
    """Add up what each device holds; pages get `DEVICE_SHARE` of what the rest leaves."""
    config, model_config = planned.config, planned.model_config
    assert config.max_model_len
    mesh: Any = abstract_mesh(config.tensor_parallel_size, config.expert_parallel)
    model, _ = abstract_model(model_config, config.dtype)
    divide_experts(model, mesh)
    parameters = flat_parameters(nnx.state(model))
    weights: dict[str, int] = {}
    for path, sharding in parameter_shardings(mesh, parameters).items():
        p = parameters[path]
        held = math.prod(sharding.shard_shape(p.shape)) * p.dtype.itemsize
        kind = _kind(path)
        weights[kind] = weights.get(kind, 0) + held
    stored, _ = abstract_model(model_config.as_stored(), config.dtype)
    in_all = sum(math.prod(p.shape) for p in flat_parameters(nnx.state(stored)).values())

    shape = cache_shape(model_config, (), config.page_size, planned.shapes.page_dtype)
    K = model_config.num_key_value_heads
    (_, own_heads) = page_sharding(mesh, K).shard_shape((1, K))
    page_bytes = dataclasses.replace(shape, num_kv_heads=own_heads).page_bytes(0)
    room = topology.memory_bytes - sum(weights.values()) - temporaries.largest
    budget = config.kv_cache_memory_bytes or int(max(room, 0) * DEVICE_SHARE)
    most = config.max_num_seqs * -(-config.max_model_len // config.page_size)
    asked = config.num_pages if config.num_pages and config.num_pages > 1 else None
    return MemoryPlan(
        model=name,
        topology=topology,
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel=config.expert_parallel,
        replicas=topology.count // config.tensor_parallel_size,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        num_parameters=in_all,
        weight_bytes=weights,
        temporaries=temporaries,
        page_bytes=page_bytes,
        page_size=config.page_size,
        num_pages=asked or min(most, budget // page_bytes),
        max_model_len=config.max_model_len,
        memory_bytes=topology.memory_bytes,
        costs=(*costs(model_config, mesh), *_overestimates(model_config)),
    )


def estimate_temporaries(planned: PlannedModel) -> Temporaries:
    """Return a rough figure: a layer's widest arrays, and the sampler's passes over the logits."""
    config, model_config = planned.config, planned.model_config
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
    return Temporaries(
        by_program={"backbone": int(backbone), "sampler": int(sampler)},
        compiled=False,
        note="estimated from the widest activations; no compiler was asked",
    )


def _overestimates(config: ModelConfig) -> list[str]:
    """What is counted as more than it will be, in words."""
    if not any(config.sliding_windows):
        return []
    return ["pages of layers with a sliding window are counted as if these saw everything"]


def _kind(path: str) -> str:
    """Which kind of weight a path names, for the table."""
    if path.startswith(("embed", "lm_head", "positions")):
        return "embedding and head"
    if ".attention." in path:
        return "attention"
    if re.search(r"\.mlp\.(gate|up|down)(_bias)?$", path):
        return "experts"
    return "feed-forward" if ".mlp." in path else "norms"
