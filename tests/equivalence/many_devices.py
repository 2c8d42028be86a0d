"""Run by `test_many_devices` in a process of its own: the device count is fixed at start-up.

Reads cases from stdin, one report each goes to stdout.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

NUM_DEVICES = 8
BUCKETS = (16,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model on some devices.

    Attributes:
        model: Name of a golden checkpoint.
        tensor: Devices that share each layer.
        expert: Of these, devices that divide the experts.
        replicas: Engines, each on devices of its own.
        converted: Load from a folder of our own arrays, made of the checkpoint.
        settings: Of the engine.
        programs: Whose collectives are listed.
    """

    model: str
    tensor: int
    expert: int = 1
    replicas: int = 1
    converted: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    programs: list[list[Any]] = dataclasses.field(default_factory=lambda: [["backbone", 16]])


def report_on(case: Case, known: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """Return how the case's devices differ from one, and what their programs do.

    What one device computes is kept in `known`, by model and settings.
    """
    import numpy as np

    from tests.engines import config_of, logits_of, run_tokens
    from tests.equivalence.test_engine import mixed_work

    work = mixed_work(8, longest=30)
    prompt = np.random.default_rng(1).integers(3, 300, 40)
    settings = json.dumps(case.settings)
    if (case.model, settings) not in known:
        one = engine_on(case.model, 1, settings=case.settings)
        known[case.model, settings] = run_tokens(one, work), logits_of(one, prompt, 16)
    expected, logits = known[case.model, settings]
    found: dict[str, Any] = {"case": dataclasses.asdict(case), "differing": [], "error": 0.0}
    found["product_error"] = int8_product_error(case.tensor)
    for replica in range(case.replicas):
        engine = engine_on(
            case.model,
            case.tensor,
            case.expert,
            replica=replica,
            converted=case.converted,
            settings=case.settings,
        )
        tokens = run_tokens(engine, work)
        found["differing"] += [name for name in work if tokens[name] != expected[name]]
        error = np.abs(logits_of(engine, prompt, 16) - logits)
        found["error"] = max(found["error"], float(error.max()))
        found["spread"] = float(np.sqrt(np.mean(error**2)) / logits.std())
    programs = engine.runner.programs
    model = programs.backbone
    found["layers"] = config_of(case.model).num_hidden_layers
    found["specs"] = {
        path: str(leaf.sharding.spec) for path, leaf in zip(model.paths, model.leaves, strict=True)
    }
    found["whole_bytes"] = sum(leaf.nbytes for leaf in model.leaves)
    found["device_bytes"] = sum(leaf.addressable_shards[0].data.nbytes for leaf in model.leaves)
    found["devices"] = sorted(d.id for d in model.leaves[0].sharding.device_set)
    found["collectives"] = {
        " ".join(map(str, key)): collectives(programs.compiled[tuple(key)].as_text())
        for key in case.programs
    }
    return found


def engine_on(
    name: str,
    tensor: int,
    expert: int = 1,
    *,
    replica: int = 0,
    converted: bool = False,
    settings: dict[str, Any] | None = None,
) -> Any:
    """Return an engine whose model lies on some of the devices."""
    from jaxinfer.config import EngineConfig
    from jaxinfer.convert import convert
    from jaxinfer.engine import Engine
    from jaxinfer.model_runner import ModelRunner
    from jaxinfer.model_source import ModelSource, load_model
    from jaxinfer.models import lay_out_heads
    from jaxinfer.resolution import resolve, runner_config
    from jaxinfer.sharding import make_mesh
    from tests.engines import GOLDEN, SMALL, FewBuckets, config_of, source_of

    model_config = lay_out_heads(config_of(name), tensor)
    config = resolve(
        EngineConfig(
            **SMALL
            | {"warmup": False, "num_pages": 64, "num_window_pages": 64, "max_model_len": 128}
            | (settings or {}),
            tensor_parallel_size=tensor,
            expert_parallel=expert,
        ),
        model_config,
    )
    model_config = model_config.for_length(config.max_model_len)
    devices = jax.devices()[replica * tensor :]
    mesh = make_mesh(tensor, devices, expert_parallel=expert)
    source = source_of(name)
    with tempfile.TemporaryDirectory() as folder:
        if converted:
            # Not every tiny checkpoint has a tokenizer, which a folder of our own must have.
            original = shutil.copytree(source.path, Path(folder) / "original")
            shutil.copy(GOLDEN / "llama3" / "tokenizer.json", original)
            made = convert(str(original), str(Path(folder) / "converted"), dtype=config.dtype)
            source = ModelSource.open(str(made))
        model, parameters = load_model(
            source, model_config, mesh, config.dtype, quantization=config.quantization
        )
        jax.block_until_ready(parameters)
    shapes = runner_config(config, model_config)
    fields = {f.name: getattr(shapes, f.name) for f in dataclasses.fields(shapes)}
    fields["max_num_batched_tokens"] = max(BUCKETS)
    runner = ModelRunner(model_config, model, parameters, mesh, FewBuckets(**fields, sizes=BUCKETS))
    config = dataclasses.replace(config, max_num_batched_tokens=max(BUCKETS))
    return Engine(config, runner, vocab_size=model_config.vocab_size, eos_token_ids=frozenset({2}))


def int8_product_error(tensor: int) -> float:
    """Return how far an int8 product of several devices is from that of one.

    Outputs and inputs are divided in turn; of the inputs each device has whole blocks.
    """
    import numpy as np
    from flax import nnx

    from jaxinfer.divided_int8 import DividedInt8Linear
    from jaxinfer.nn import Linear
    from jaxinfer.quant import Int8Linear
    from jaxinfer.sharding import divided, make_mesh

    rng, mesh, worst = np.random.default_rng(0), make_mesh(tensor), 0.0
    for axes in (("embed", "mlp"), ("mlp", "embed")):
        shape = (64 * tensor, 64 * tensor)
        n = shape[0]
        linear = Int8Linear(
            nnx.eval_shape(lambda n=n, a=axes: Linear(n, (n,), dtype=np.float32, axes=a))
        )
        names = linear.kernel.get_metadata("axes")
        kernel = rng.integers(-127, 128, shape).astype(np.int8)
        scale = rng.random(shape[0]).astype(np.float32)
        x = rng.normal(size=(5, shape[0])).astype(np.float32)
        own = tuple("tensor" if name == "mlp" else None for name in names)
        both = []
        for each in (linear, DividedInt8Linear(linear, mesh, own)):
            graph, state = nnx.split(each)
            leaves = (
                jax.device_put(kernel, divided(mesh, shape, names)),
                jax.device_put(scale, divided(mesh, shape[:1], names[:1])),
            )
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
            both.append(np.asarray(jax.jit(lambda s, x, g=graph: nnx.merge(g, s)(x))(state, x)))
        worst = max(worst, float(np.abs(both[0] - both[1]).max() / both[0].std()))
    return worst


def collectives(hlo: str) -> list[str]:
    """Return "kind type, type" of each collective of a compiled program, sorted."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (\(?[^=]*?) ({kinds})(?:-start)?\(", hlo)
    return sorted(f"{kind} {' '.join(re.findall(r'\w+\[[\d,]*\]', text))}" for text, kind in found)


def main() -> None:
    """Answer every case."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    # As in the process of the tests.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    known: dict[tuple[str, str], Any] = {}
    reports = [report_on(Case(**case), known) for case in json.load(sys.stdin)]
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
