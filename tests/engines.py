"""Engines over the committed tiny checkpoints, and ways to run requests through them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch import ScheduledRow, StepPlan
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.model_runner import ModelRunner
from jaxinfer.model_source import ModelSource, abstract_model, load_model
from jaxinfer.models import ModelConfig, family_of
from jaxinfer.request import Request, TokenOutput
from jaxinfer.resolution import resolve, runner_config
from jaxinfer.runner_config import RunnerConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sharding import make_mesh

GOLDEN = Path(__file__).parent / "golden" / "models"
FAMILIES = Path(__file__).parent / "golden" / "families"

SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "num_pages": 256,
    "num_window_pages": 256,
    "dtype": "float32",
    # One program less for each bucket of rows; tests/equivalence/test_decode_steps.py has more.
    "num_decode_steps": 1,
}
"""Settings under which a tiny model compiles in seconds."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One request of a test."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewBuckets(RunnerConfig):
    """Shapes of as few programs as a test needs."""

    sizes: tuple[int, ...]

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return (self.max_num_seqs,)


def source_of(name: str) -> ModelSource:
    """Open a golden checkpoint."""
    folder = GOLDEN if (GOLDEN / name).exists() else FAMILIES
    return ModelSource.open(str(folder / name))


@functools.cache
def config_of(name: str) -> ModelConfig:
    """Return a golden checkpoint's sizes."""
    source = source_of(name)
    return family_of(source.config).translate(source.config)


@functools.cache
def loaded(
    name: str, dtype: str = "float32", quantization: str | None = None, kernels: str = "xla"
):
    """Return a golden checkpoint's source, config, abstract model and parameters."""
    source, config = source_of(name), config_of(name)
    model, parameters = load_model(
        source, config, make_mesh(), jnp.dtype(dtype), quantization=quantization, kernels=kernels
    )
    return source, config, model, parameters


# Few at a time: each compiled program holds hundreds of memory mappings, and a process may have
# 65,530; XLA crashes beyond. Tests are ordered by checkpoint, so few are needed.
@functools.lru_cache(maxsize=6)
def _runner(name: str, config: RunnerConfig, quantization: str | None, kernels: str) -> ModelRunner:
    weights = (quantization, kernels)
    _, model_config, model, parameters = loaded(name, jnp.dtype(config.dtype).name, *weights)
    settled = model_config.for_length(config.max_model_len)
    if settled != model_config:
        model, _ = abstract_model(settled, config.dtype, *weights)
    return ModelRunner(model_config, model, parameters, make_mesh(), config)


def make_engine(name: str, buckets: tuple[int, ...] = (), **settings) -> Engine:
    """Return a fresh engine; those of equal shapes share a runner, and so its programs.

    Their pages then hold what an earlier engine left there, as in a long-running server. With
    `buckets` of tokens there are these programs and no other, whatever the settings say of budgets
    and pages: for where many models are compiled.
    """
    model_config = config_of(name)
    config = resolve(EngineConfig(**{**SMALL, "warmup": False, **settings}), model_config)
    shapes = runner_config(config, model_config)
    if buckets:
        fields = {f.name: getattr(shapes, f.name) for f in dataclasses.fields(shapes)}
        # Enough for whatever pools an engine has: they only have to lie within.
        most = max(SMALL["num_pages"], config.num_pages)
        fields |= {"max_num_batched_tokens": max(buckets), "num_pages": most}
        fields |= {"num_window_pages": most if shapes.windows else 0}
        shapes = FewBuckets(**fields, sizes=buckets)
    return Engine(
        config,
        _runner(name, shapes, config.quantization, config.kernels),
        vocab_size=model_config.vocab_size,
        eos_token_ids=frozenset({2}),
    )


def run(engine: Engine, work: Mapping[str, Work]) -> dict[str, list[TokenOutput]]:
    """Run all requests at once and return what each was given."""
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in work}
    for name, w in work.items():
        engine.add_request(
            name, w.prompt, w.params, seed=w.seed, priority=w.priority, cache_salt=w.cache_salt
        )
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id].append(output)
    engine.check_integrity()
    return outputs


def tokens_of(outputs: Iterable[TokenOutput]) -> list[int]:
    """Return all tokens of a request."""
    return [token for output in outputs for token in output.new_token_ids]


def run_tokens(engine: Engine, work: Mapping[str, Work]) -> dict[str, list[int]]:
    """Run all requests at once and return their tokens."""
    return {name: tokens_of(outputs) for name, outputs in run(engine, work).items()}


def run_alone(engine: Engine, work: Mapping[str, Work]) -> dict[str, list[int]]:
    """Run the requests one after the other."""
    return {name: run_tokens(engine, {name: w})[name] for name, w in work.items()}


def logits_of(engine: Engine, token_ids: np.ndarray, chunk: int) -> np.ndarray:
    """Return float32 [T, V]: the logits at every position, computed `chunk` tokens a step."""
    return head_of(engine, hidden_of(engine, token_ids, chunk))


def head_of(engine: Engine, hidden: np.ndarray) -> np.ndarray:
    """Return the logits [T, V] of hidden states [T, D]; compiled on each call."""
    return jax.device_get(engine.runner.programs.logits(hidden))


def hidden_of(engine: Engine, token_ids: np.ndarray, chunk: int) -> np.ndarray:
    """Return [T, D]: what goes to the head, at every position, computed `chunk` tokens a step."""
    runner: ModelRunner = engine.runner
    request = Request(
        request_id="logits",
        prompt_token_ids=token_ids.tolist(),
        params=SamplingParams(),
        seed=0,
        max_total_tokens=len(token_ids) + 1,
    )
    pages = engine.scheduler.pages
    assert pages.admit(request, hashes=(), spare=0)
    parts = []
    for start in range(0, len(token_ids), chunk):
        n = min(chunk, len(token_ids) - start)
        request.num_computed_tokens = start
        assert pages.grow(request, start + n)
        row = ScheduledRow(
            request=request, start=start, num_scheduled_tokens=n, samples=False, epoch=0
        )
        parts.append(jax.device_get(runner.forward(StepPlan(rows=(row,))).tokens)[:n])
    pages.release(request)
    return np.concatenate(parts)
