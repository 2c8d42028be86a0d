"""Run by `test_replicas` in a process of its own: the device count is fixed at start-up."""

from __future__ import annotations

import asyncio
import json
import sys

import jax

jax.config.update("jax_num_cpu_devices", 4)


def main() -> None:
    """Print the tokens of one engine and of two replicas, and where each replica's cache is."""
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.config import EngineConfig
    from jaxinfer.loading import load, load_replicas
    from jaxinfer.replicas import Replicas, ServingEngine
    from jaxinfer.sampling_params import SamplingParams
    from tests.engines import GOLDEN, SMALL

    settings = {**SMALL, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 64}
    config = EngineConfig(model=str(GOLDEN / "llama3"), warmup=False, **settings)
    split = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    prompts = [[3 + (7 * i + j) % 300 for j in range(4 + 3 * i)] for i in range(6)]
    params = [
        SamplingParams(max_tokens=6, temperature=float(i % 2), seed=i, ignore_eos=True)
        for i in range(6)
    ]

    async def tokens(engine: ServingEngine) -> list[list[int]]:
        async def one(i: int) -> list[int]:
            async for output in engine.generate(prompts[i], params[i], final_only=True):
                return list(output.outputs[0].token_ids)
            return []

        return list(await asyncio.gather(*(one(i) for i in range(6))))

    single = AsyncEngine(load(config, progress=False))
    loaded = load_replicas(EngineConfig(**{**vars(config), **split}), progress=False)
    face = Replicas(loaded)
    report = {
        "one": asyncio.run(tokens(single)),
        "two": asyncio.run(tokens(face)),
        "used": [engine.stats.generation_tokens for engine in face.engines],
        "devices": [
            sorted(d.id for d in model.engine.runner._cache.token_ids.devices()) for model in loaded
        ],
        "pages": [model.config.num_pages for model in loaded],
    }
    single.shutdown()
    face.shutdown()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
