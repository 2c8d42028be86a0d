"""Temporaries of a planned model, as XLA's compiler tells them without the devices.

The compiler runs in a process of its own, which alone sees the GPU plugin. Temporaries do not grow
with depth, so one layer of each kind stands for all of them.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig
from jaxinfer.footprint import abstract_model, one_layer_of_each_kind
from jaxinfer.kv_cache import KVCache, make_cache
from jaxinfer.models import flat_parameters
from jaxinfer.planning import (
    MemoryPlan,
    PlannedModel,
    Temporaries,
    Topology,
    config_of,
    estimate_temporaries,
    make_plan,
    plan_model,
    remedies,
)
from jaxinfer.sharding import (
    MESH_AXES,
    divide_experts,
    page_sharding,
    parameter_shardings,
    replicated,
)
from jaxinfer.step_programs import StepPrograms, cache_shape
from pallas_kernels.aot import CHIPS, Toolchain, ToolchainError
from pallas_kernels.aot.chips import targeting

TIMEOUT_S = 900.0


def plan_memory(config: EngineConfig, topology: str, *, compiled: bool = True) -> MemoryPlan:
    """Return what a model takes of each device.

    Args:
        config: Settings; without a `tensor_parallel_size` all devices share each layer.
        topology: As `Topology.parse` reads it.
        compiled: Ask a compiler for the temporaries, if there is one; else estimate them.

    Raises:
        ConfigError, ModelError, checkpoints.CheckpointError: Something does not go together.
    """
    devices = Topology.parse(topology)
    name, hf = config_of(config.model)
    planned = plan_model(config, hf, devices)
    temporaries = estimate_temporaries(planned)
    if compiled:
        try:
            toolchain = Toolchain.of_environment()
            temporaries = compiled_temporaries(config, hf, devices, toolchain)
        except (ToolchainError, RuntimeError, subprocess.TimeoutExpired) as error:
            temporaries = dataclasses.replace(
                temporaries, note=f"estimated from the widest activations: {error}"
            )
    plan = make_plan(name, planned, devices, temporaries)
    return dataclasses.replace(plan, remedies=remedies(plan, config, hf))


def compiled_temporaries(
    config: EngineConfig, hf: Mapping[str, Any], topology: Topology, toolchain: Toolchain
) -> Temporaries:
    """Compile the largest programs of a model and return what they need.

    Raises:
        ToolchainError: There is no compiler.
        RuntimeError: The compiler failed; its last words are in the message.
    """
    toolchain.check()
    job = {"config": dataclasses.asdict(config), "hf": dict(hf), "topology": vars(topology)}
    with tempfile.TemporaryDirectory(prefix="plan-") as name:
        scratch = Path(name)
        process = subprocess.run(
            [sys.executable, "-m", "jaxinfer.plan_compile"],
            env=toolchain.environment(scratch),
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if process.returncode:
        words = [line for line in process.stderr.splitlines() if line.strip()][-1:]
        raise RuntimeError(f"compiling for {topology.chip} failed: {' '.join(words)[:500]}")
    answer = json.loads(process.stdout.splitlines()[-1])
    return Temporaries(by_program=answer["temporaries"], compiled=True, note=answer["note"])


def main() -> None:
    """Answer the job on stdin with one line of JSON."""
    job = json.load(sys.stdin)
    topology = Topology(**job["topology"])
    planned = plan_model(EngineConfig(**job["config"]), job["hf"], topology)
    model_config, layers = one_layer_of_each_kind(planned.model_config)
    planned = dataclasses.replace(planned, model_config=model_config)
    size, experts = planned.config.tensor_parallel_size, planned.config.expert_parallel
    devices = CHIPS[topology.compiled_for].mesh(size).devices
    mesh = Mesh(np.array(devices).reshape(1, experts, -1), MESH_AXES)
    with targeting(mesh):
        found = temporaries_of(planned, mesh)
    which = ", ".join(f"{layer} for {count}" for layer, count in layers.items())
    note = f"XLA's, compiled for {topology.compiled_for} with one layer of each kind: {which}"
    sys.stdout.write(json.dumps({"temporaries": found, "note": note}) + "\n")


def temporaries_of(planned: PlannedModel, mesh: Mesh) -> dict[str, int]:
    """Compile backbone and sampler of the largest buckets; return bytes of one device by program.

    Args:
        planned: A model and the shapes to serve.
        mesh: Devices of the process's platform, or that exist only abstractly.
    """
    model_config, shapes = planned.model_config, planned.shapes
    # Enough that no page array is mistaken for a temporary; arguments cost nothing.
    most = max(shapes.num_pages, shapes.max_pages)
    shapes = dataclasses.replace(
        shapes, num_pages=most, num_window_pages=most if shapes.windows else 0
    )
    model, _ = abstract_model(model_config, shapes.dtype, planned.config.quantization)
    divide_experts(model, mesh)
    parameters = flat_parameters(nnx.state(model))
    shardings = parameter_shardings(mesh, parameters)
    weights = {
        path: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shardings[path])
        for path, p in parameters.items()
    }
    shape = cache_shape(model_config, shapes.windows, shapes.page_size, shapes.page_dtype)
    cache = jax.eval_shape(lambda: make_cache(shape, shapes.group_pages, (None, None)))
    cache = KVCache(
        _placed(cache.layers, page_sharding(mesh, model_config.num_key_value_heads)),
        _placed(cache.token_ids, replicated(mesh)),
    )
    programs = StepPrograms(model, weights, mesh, shapes, cache)
    keys = {"backbone": shapes.token_buckets[-1], "sampler": shapes.row_buckets[-1]}
    found = {}
    for kind, size in keys.items():
        memory = programs.compiled.lower((kind, size)).compile().memory_analysis()
        assert memory is not None
        found[f"{kind} {size}"] = memory.temp_size_in_bytes
    return found


def _placed(tree: Any, sharding: jax.sharding.NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


if __name__ == "__main__":
    main()
