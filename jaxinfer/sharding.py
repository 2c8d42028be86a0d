"""The device mesh, and the one table from logical axes to mesh axes.

A mesh has three axes. "data" numbers the replicas; an engine runs on one of them, so in its mesh
that axis has one device. The others share each layer: attention, dense feed-forward and vocabulary
are divided among all of them, a mixture's experts over "expert", and each expert over "tensor".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import ConfigError
from jaxinfer.models import Transformer
from jaxinfer.models.config import ModelConfig
from jaxinfer.nn import DividedMoE, MoE
from jaxinfer.selection import Shards
from jaxinfer.surgery import modules_of, replace

logger = logging.getLogger(__name__)

MESH_AXES = ("data", "expert", "tensor")

RULES: Mapping[str, tuple[str, ...]] = {
    # logical axis → mesh axes
    "embed": (),
    "heads": ("expert", "tensor"),
    "kv_heads": ("expert", "tensor"),
    "mlp": ("expert", "tensor"),
    "vocab": ("expert", "tensor"),
    "experts": ("expert",),
    "expert_mlp": ("tensor",),
}
"""An axis of an array that its mesh axes do not divide evenly is held whole by every device."""


def device_groups(num_groups: int, group_size: int) -> list[list[jax.Device]]:
    """Return this process's devices in groups of neighbours, one for each replica.

    Raises:
        ConfigError: There are fewer devices than asked for.
    """
    devices = jax.local_devices()
    if num_groups * group_size > len(devices):
        raise ConfigError(
            f"data_parallel_size={num_groups} replicas on tensor_parallel_size={group_size} devices"
            f" each need {num_groups * group_size}; this process sees {len(devices)}"
        )
    return [devices[i * group_size : (i + 1) * group_size] for i in range(num_groups)]


def make_mesh(
    tensor_parallel_size: int = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    expert_parallel: int = 1,
) -> Mesh:
    """Return the mesh of one replica, over the first of some devices.

    Args:
        tensor_parallel_size: Devices that share each layer.
        devices: The replica's; None: all there are.
        expert_parallel: Of these, so many divide the experts among them; it must divide their
            number.

    Raises:
        ConfigError: There are fewer devices than asked for.
    """
    devices = jax.devices() if devices is None else devices
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many devices; "
            f"this process sees {len(devices)}"
        )
    own = np.array(devices[:tensor_parallel_size])
    return Mesh(own.reshape(1, expert_parallel, -1), MESH_AXES)


def mesh_axes(
    mesh: Mesh | AbstractMesh, axis: str | None, size: int | None = None
) -> tuple[str, ...] | None:
    """Return the mesh axes over which a logical axis of this size is divided, None for none."""
    axes = tuple(a for a in RULES[axis] if a in mesh.axis_names) if axis else ()
    shards = math.prod(mesh.shape[a] for a in axes)
    return axes if axes and (size is None or size % shards == 0) else None


def divided(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of an array of this shape, whose axes have these logical names."""
    spec = (mesh_axes(mesh, a, n) for a, n in zip(axes, shape, strict=True))
    return NamedSharding(mesh, PartitionSpec(*spec))


def logical(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Return the sharding of an array whose axes have these logical names and divide evenly."""
    return NamedSharding(mesh, PartitionSpec(*(mesh_axes(mesh, a) for a in axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return a host's array on the devices; of many hosts each puts its own part there."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def parameter_shardings(
    mesh: Mesh, parameters: Mapping[str, nnx.Variable]
) -> dict[str, NamedSharding]:
    """Return each parameter's sharding, from the logical axes it was declared with."""
    return {path: divided(mesh, p.shape, p.get_metadata("axes")) for path, p in parameters.items()}


def page_sharding(mesh: Mesh, num_kv_heads: int) -> NamedSharding:
    """Return the sharding of KV pages [num_pages, K, ...]."""
    return NamedSharding(mesh, PartitionSpec(None, mesh_axes(mesh, "kv_heads", num_kv_heads)))


def query_axes(mesh: Mesh, config: ModelConfig) -> tuple[str, ...] | None:
    """Return the mesh axes over which attention's queries are divided by head, None for none.

    Queries stay with their KV head, unless there is only one, which every device may hold.
    """
    kv_axes = mesh_axes(mesh, "kv_heads", config.num_key_value_heads)
    if kv_axes is None and config.num_key_value_heads > 1:
        return None
    return mesh_axes(mesh, "heads", config.num_attention_heads)


def vocab_shards(mesh: Mesh, vocab_size: int) -> Shards | None:
    """Return how logits are divided among devices, None if each has them whole."""
    axes = mesh_axes(mesh, "vocab", vocab_size)
    shards = Shards(mesh, axes) if axes else None
    return shards if shards is not None and shards.count > 1 else None


def divide_experts(model: Transformer, mesh: Mesh) -> None:
    """Let each device of several run its own part of every mixture, in place."""
    if mesh.size == 1:
        return
    for path, moe in modules_of(model, MoE):
        E, _, F = moe.gate.shape
        axes = (mesh_axes(mesh, "experts", E), mesh_axes(mesh, "expert_mlp", F))
        replace(model, path, DividedMoE(moe, mesh, *(a or () for a in axes)))


def check_experts(config: ModelConfig, tensor_parallel_size: int, expert_parallel: int) -> None:
    """Refuse to divide experts that are not there, or among devices that are not.

    Raises:
        ConfigError: Says which.
    """
    if expert_parallel == 1:
        return
    if tensor_parallel_size % expert_parallel:
        raise ConfigError(
            f"expert_parallel ({expert_parallel}) must divide tensor_parallel_size "
            f"({tensor_parallel_size}), whose devices it arranges"
        )
    if config.moe is None:
        raise ConfigError(f"expert_parallel={expert_parallel}, but the model has no experts")
    if config.moe.num_experts % expert_parallel:
        raise ConfigError(
            f"expert_parallel={expert_parallel} must divide the {config.moe.num_experts} experts"
        )


def costs(config: ModelConfig, mesh: Mesh) -> list[str]:
    """Return, in words, what every device does or holds beyond its share because of odd sizes.

    Args:
        config: With heads as `jaxinfer.models.head_layout` laid them out.
        mesh: The devices.
    """
    n = mesh.shape.get("expert", 1) * mesh.shape["tensor"]
    if n == 1:
        return []
    found = []
    N, K = config.num_attention_heads, config.num_key_value_heads
    if config.stored_heads is not None:
        stored_N, stored_K = config.stored_heads
        found.append(
            f"{stored_N} query and {stored_K} KV heads became {N} and {K}, which {n} devices can "
            f"share: attention computes {N / stored_N - 1:.0%} and its cache takes "
            f"{K / stored_K - 1:.0%} more than they need"
        )
    if config.latent is not None:
        found.append(f"every device holds the latents of all {N} heads")
    elif mesh_axes(mesh, "kv_heads", K) is None:
        found.append(f"every device holds all {N} query and {K} KV heads, and their cache")
    whole = {
        "intermediate_size": ("mlp", config.intermediate_size),
        "vocab_size": ("vocab", config.vocab_size),
    }
    if config.moe is not None:
        whole["an expert's intermediate_size"] = ("expert_mlp", config.moe.intermediate_size)
        if config.moe.shared_intermediate_size:
            whole["shared_intermediate_size"] = ("mlp", config.moe.shared_intermediate_size)
    found += [
        f"every device holds all of {name} ({size}), which {n} devices cannot share evenly"
        for name, (axis, size) in whole.items()
        if mesh_axes(mesh, axis, size) is None
    ]
    return found


def log_costs(config: ModelConfig, mesh: Mesh) -> None:
    """Log what `costs` finds."""
    for cost in costs(config, mesh):
        logger.warning("devices: %s", cost)
