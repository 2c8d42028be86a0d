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

import jax.numpy as jnp

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.footprint import (
    abstract_mesh,
    estimated_temporaries,
    num_parameters,
    weight_bytes,
)
from jaxinfer.memory import DEVICE_SHARE
from jaxinfer.model_source import ModelSource
from jaxinfer.models import ModelConfig, family_of, lay_out_heads
from jaxinfer.presets import PRESETS
from jaxinfer.resolution import page_counts, runner_config, wanted_model_len
from jaxinfer.runner_config import RunnerConfig, cache_shape
from jaxinfer.sharding import (
    check_experts,
    costs,
    page_sharding,
)
from pallas_kernels.aot import CHIPS

VARIANTS: Mapping[str, tuple[str, int]] = {"h200": ("h100", 150_000_000_000)}
"""Chips that differ from one that is compiled for in their memory only, and its bytes."""

CHIP_NAMES = (*CHIPS, *VARIANTS)
MIN_TOKENS = 256
"""A shorter sequence is not worth proposing."""


@dataclass(frozen=True)
class Topology:
    """Devices of one kind.

    Attributes:
        chip: One of `CHIP_NAMES`.
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
        if not found or found[1] not in CHIP_NAMES:
            raise ConfigError(
                f"topology must be CHIP:COUNT with a chip of {', '.join(CHIP_NAMES)}, such as "
                "h100:8; "
                f"got {text!r}"
            )
        return cls(found[1], int(found[2]))

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        if self.chip in VARIANTS:
            return VARIANTS[self.chip][1]
        return CHIPS[self.chip].memory_bytes

    @property
    def compiled_for(self) -> str:
        """Name in `CHIPS` of the chip that runs the same programs."""
        return VARIANTS[self.chip][0] if self.chip in VARIANTS else self.chip


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
        page_bytes: Of a page of tokens that hold whole sequences, over all layers that see these.
        page_size: Tokens of a page.
        num_pages: Of these, that fit, or that were asked for.
        windows: Sliding windows that have pages of their own.
        window_page_bytes: Of a page of each window together.
        num_window_pages: Pages of each window.
        max_model_len: Longest sequence.
        memory_bytes: That a device has.
        costs: What odd sizes cost, in words.
        remedies: What would make room if it does not fit, in words.
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
    windows: tuple[int, ...]
    window_page_bytes: int
    num_window_pages: int
    max_model_len: int
    memory_bytes: int
    costs: tuple[str, ...]
    remedies: tuple[str, ...] = ()

    @property
    def total_weight_bytes(self) -> int:
        return sum(self.weight_bytes.values())

    @property
    def cache_bytes(self) -> int:
        windows = self.num_window_pages * self.window_page_bytes
        return self.num_pages * self.page_bytes + windows

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
        asked: Settings that say of pages what was asked for.
        config: Settings, resolved as far as the plan needs.
        model_config: Sizes, heads laid out.
        shapes: What the runner would serve; `num_pages` is not yet known.
    """

    asked: EngineConfig
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
    replicas, size = config.data_parallel_size, config.tensor_parallel_size
    if topology.count % replicas:
        raise ConfigError(
            f"data_parallel_size={replicas} must divide the {topology.count} devices of the "
            "topology"
        )
    if size == 1:
        size = topology.count // replicas
    if topology.count % (size * replicas):
        raise ConfigError(
            f"tensor_parallel_size={size} of data_parallel_size={replicas} replicas must divide "
            f"the {topology.count} devices of the topology"
        )
    wanted = wanted_model_len(config, model_config)
    experts = config.expert_parallel
    if experts == 1 and model_config.moe is not None:
        experts = math.gcd(model_config.moe.num_experts, size)
    check_experts(model_config, size, experts)
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    asked = dataclasses.replace(
        config,
        tensor_parallel_size=size,
        expert_parallel=experts,
        dtype=dtype,
        kernels="xla",
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=wanted,
    )
    model_config = lay_out_heads(model_config, size).for_length(wanted)
    # The shapes of programs need a number of pages; how many fit is not known yet.
    config = dataclasses.replace(asked, num_pages=asked.num_pages or 1)
    shapes = runner_config(config, model_config)
    return PlannedModel(asked=asked, config=config, model_config=model_config, shapes=shapes)


def make_plan(
    name: str, planned: PlannedModel, topology: Topology, temporaries: Temporaries
) -> MemoryPlan:
    """Add up what each device holds; pages get `DEVICE_SHARE` of what the rest leaves."""
    config, model_config = planned.config, planned.model_config
    assert config.max_model_len
    mesh: Any = abstract_mesh(config.tensor_parallel_size, config.expert_parallel)
    weights = weight_bytes(config, model_config)
    windows = planned.shapes.windows
    shape = cache_shape(model_config, windows, config.page_size, planned.shapes.page_dtype)
    K = model_config.num_key_value_heads
    (_, own_heads) = page_sharding(mesh, K).shard_shape((1, K))
    shape = dataclasses.replace(shape, num_kv_heads=own_heads)
    page_bytes = [shape.page_bytes(group) for group in range(1 + len(windows))]
    room = topology.memory_bytes - sum(weights.values()) - temporaries.largest
    num_pages, num_window_pages = page_counts(
        planned.asked,
        windows,
        planned.shapes.max_pages,
        page_bytes,
        lambda _: config.kv_cache_memory_bytes or int(max(room, 0) * DEVICE_SHARE),
    )
    return MemoryPlan(
        model=name,
        topology=topology,
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel=config.expert_parallel,
        replicas=topology.count // config.tensor_parallel_size,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        num_parameters=num_parameters(model_config),
        weight_bytes=weights,
        temporaries=temporaries,
        page_bytes=page_bytes[0],
        page_size=config.page_size,
        num_pages=num_pages,
        windows=windows,
        window_page_bytes=sum(page_bytes[1:]),
        num_window_pages=num_window_pages if windows else 0,
        max_model_len=config.max_model_len,
        memory_bytes=topology.memory_bytes,
        costs=tuple(costs(model_config, mesh)),
    )


def estimate_temporaries(planned: PlannedModel) -> Temporaries:
    """Return a rough figure."""
    return Temporaries(
        by_program=estimated_temporaries(planned.config, planned.model_config),
        compiled=False,
        note="estimated from the widest activations; no compiler was asked",
    )


def remedies(plan: MemoryPlan, config: EngineConfig, hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return, in words, what would make room for a model that does not fit; () if it fits."""
    if plan.fits:
        return ()
    found = []
    size, count = plan.tensor_parallel_size, plan.topology.count
    tokens = plan.num_pages * plan.page_size
    if plan.free_bytes >= 0 and tokens >= MIN_TOKENS:
        found.append(f"--max-model-len {tokens}, which the pages hold")
    roomier = [
        Topology(chip, count)
        for chip in sorted(CHIP_NAMES, key=lambda chip: Topology(chip, 1).memory_bytes)
        if Topology(chip, 1).memory_bytes > plan.memory_bytes
    ]
    more = [Topology(plan.topology.chip, count * factor) for factor in (2, 4, 8)]
    for topologies in (roomier, more):
        for topology in topologies:
            wider = size * topology.count // count
            # The experts are divided anew unless somebody said how.
            asked = dataclasses.replace(config, tensor_parallel_size=wider)
            planned = plan_model(asked, hf, topology)
            if make_plan(plan.model, planned, topology, estimate_temporaries(planned)).fits:
                found.append(f"{topology.count} x {topology.chip}")
                break
    if not found:
        found.append("no chip that is known, nor 8 times as many: take a smaller model")
    bytes_each = plan.total_weight_bytes // jnp.dtype(plan.dtype).itemsize
    if bytes_each < plan.memory_bytes:
        found.append(
            f"not supported yet: all weights in one byte each, {bytes_each / 2**30:,.2f} GiB a "
            "device"
        )
    return tuple(found)
