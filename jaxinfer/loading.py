"""From settings to a running engine: find the model, resolve what was left open, load, warm up.

The only file that knows checkpoints, models, tokenizer and engine at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import checkpoints
from jaxinfer.compilation import use_persistent_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.memory import default_cache_dir
from jaxinfer.model_runner import ModelRunner
from jaxinfer.model_source import ModelSource, load_model
from jaxinfer.models import ModelConfig, Transformer, family_of, lay_out_heads
from jaxinfer.resolution import resolve, runner_config
from jaxinfer.sharding import check_experts, log_costs, make_mesh
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """All that a face needs.

    Attributes:
        engine: Warm unless the config says otherwise.
        tokenizer: The model's.
        config: Resolved settings.
        model_config: The model's sizes.
        name: What to call it in the API.
        generation_config: The model's own sampling defaults, HF names; {} if it has none.
    """

    engine: Engine
    tokenizer: Tokenizer
    config: EngineConfig
    model_config: ModelConfig
    name: str
    generation_config: Mapping[str, Any]


def load(config: EngineConfig, progress: bool = True) -> LoadedModel:
    """Load a model and return its engine, ready to serve.

    Args:
        config: Settings; what they leave open is resolved here, once, and logged.
        progress: Show progress bars on stderr.

    Raises:
        ConfigError: The settings do not go together, or with the model or device.
        ModelError: The checkpoint does not fit a model that is supported.
        CheckpointError: The checkpoint was not found or is damaged.
    """
    cache_dir = config.compilation_cache_dir
    if cache_dir != "":
        use_persistent_cache(Path(cache_dir) if cache_dir else default_cache_dir())
    source = ModelSource.open(config.model)
    model_config = family_of(source.config).translate(source.config)
    check_experts(model_config, config.tensor_parallel_size, config.expert_parallel)
    model_config = lay_out_heads(model_config, config.tensor_parallel_size)
    mesh = make_mesh(config.tensor_parallel_size, expert_parallel=config.expert_parallel)
    log_costs(model_config, mesh)
    config = resolve(config, model_config)
    assert config.max_model_len, "the config is resolved"
    model_config = model_config.for_length(config.max_model_len)
    runners: list[ModelRunner] = []

    def make_runner(model: Transformer, parameters: dict[str, Any]) -> None:
        shapes = runner_config(config, model_config)
        runners.append(ModelRunner(model_config, model, parameters, mesh, shapes))
        if config.warmup:
            runners[0].start_compiling()  # while the weights are read

    try:
        with _progress(progress) as stage:
            _, parameters = load_model(
                source,
                model_config,
                mesh,
                jnp.dtype(config.dtype),
                quantization=config.quantization,
                kernels=config.kernels,
                on_progress=stage("Loading weights"),
                on_model=make_runner,
            )
            text = ModelSource.open(config.tokenizer) if config.tokenizer else source
            tokenizer = tokenizer_of(text)
            (runner,) = runners
            runner.fill(parameters)
            if config.warmup:
                runner.warmup(stage("Compiling"))
    except BaseException:
        for runner in runners:
            runner.close()
        raise
    engine = Engine(
        config,
        runner,
        vocab_size=model_config.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    if config.warmup:
        engine.warmed_up()
    return LoadedModel(
        engine=engine,
        tokenizer=tokenizer,
        config=config,
        model_config=model_config,
        name=config.served_model_name or _display_name(config.model, source.path),
        generation_config=source.generation_config,
    )


def tokenizer_of(source: ModelSource) -> Tokenizer:
    """Build a model's tokenizer."""
    return Tokenizer.from_assets(source.text, dict(source.config), dict(source.generation_config))


def _display_name(asked: str | None, path: Path) -> str:
    if asked is None:
        return checkpoints.DEFAULT_NAME
    if not Path(asked).expanduser().exists():
        return asked  # a hub id
    return path.resolve().stem if path.is_file() else path.resolve().name


@contextmanager
def _progress(shown: bool):
    """Yield `stage(label)`, which returns an `on_progress(done, total)` with a bar of its own."""
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bars:

        def stage(label: str) -> Callable[[int, int], None]:
            task = bars.add_task(label, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield stage
