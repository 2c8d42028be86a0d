"""The device mesh, and the one table from logical axes to mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import ModelConfig

RULES: Mapping[str, str | None] = {
    # logical axis → mesh axis
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}


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


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh with the one axis "tensor" over the first devices, of those given if any are.

    Raises:
        ConfigError: There are fewer devices than asked for.
    """
    devices = jax.devices() if devices is None else devices
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many devices; "
            f"this process sees {len(devices)}"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), ("tensor",))


def check_divisible(config: ModelConfig, tensor_parallel_size: int) -> None:
    """Refuse a split that would cut a head or leave devices unequal.

    Raises:
        ConfigError: Names every size that does not divide.
    """
    if tensor_parallel_size == 1:
        return
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    if config.moe is not None:
        sizes["an expert's intermediate_size"] = config.moe.intermediate_size
    odd = [f"{name} ({size})" for name, size in sizes.items() if size % tensor_parallel_size]
    if odd:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} must divide {', '.join(odd)}"
        )


def logical(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Return the sharding of an array whose axes have these logical names."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[a] if a else None for a in axes)))


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
    return {path: logical(mesh, *p.get_metadata("axes")) for path, p in parameters.items()}
