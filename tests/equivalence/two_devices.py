"""Run by `test_tensor_parallel` in a process of its own: the device count is fixed at start-up."""

from __future__ import annotations

import json
import re
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)


def main() -> None:
    """Print the tokens of one and of two devices, and the collectives of a compiled backbone."""
    from jaxinfer.config import EngineConfig
    from jaxinfer.engine import Engine
    from jaxinfer.model_runner import ModelRunner
    from jaxinfer.model_source import load_model
    from jaxinfer.resolution import resolve, runner_config
    from jaxinfer.sharding import make_mesh
    from tests.engines import SMALL, loaded, make_engine, run_tokens
    from tests.equivalence.test_engine import mixed_work

    work = mixed_work(6, longest=40)
    source, model_config, _, _ = loaded("llama3")
    mesh = make_mesh(2)
    model, parameters = load_model(source, model_config, mesh, "float32")
    settings = {**SMALL, "warmup": False, "tensor_parallel_size": 2}
    config = resolve(EngineConfig(**settings), model_config)
    shapes = runner_config(config, model_config)
    runner = ModelRunner(model_config, model, parameters, mesh, shapes)
    engine = Engine(
        config, runner, vocab_size=model_config.vocab_size, eos_token_ids=frozenset({2})
    )
    report = {
        "one": run_tokens(make_engine("llama3"), work),
        "two": run_tokens(engine, work),
        "layers": model_config.num_hidden_layers,
        "halved": {path: str(a.sharding.spec) for path, a in parameters.items()},
        "collectives": re.findall(
            r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(",
            runner.programs.compiled["backbone", 8].as_text(),
        ),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
