"""From settings to a running engine: find the model, resolve what was left open, load, warm up.

The only file that knows checkpoints, models, tokenizer and engine at once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import checkpoints
from checkpoints import TextAssets
from jaxinfer.compilation import CompileGuard, use_persistent_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError
from jaxinfer.kv_cache import CacheShape
from jaxinfer.memory import cache_bytes, default_cache_dir
from jaxinfer.model_runner import ModelRunner, RunnerConfig
from jaxinfer.models import (
    ModelConfig,
    Transformer,
    family_of,
    flat_parameters,
    load_weights,
)
from jaxinfer.sharding import check_divisible, make_mesh, parameter_shardings
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a path holds, before any weight is read.

    Attributes:
        path: File or folder.
        config: HF-style.
        generation_config: HF-style, or {}.
        text: Where the tokenizer comes from.
        checkpoint: The tensors; None for an Orbax folder.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    text: TextAssets
    checkpoint: checkpoints.Checkpoint | None

    @classmethod
    def open(cls, name: str | None) -> ModelSource:
        """Find a model by name (None: the embedded default) and read all but its weights.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        path = checkpoints.resolve_source(name)
        if checkpoints.is_orbax(path):
            metadata = checkpoints.read_metadata(path)
            return cls(
                path=path,
                config=metadata["config"],
                generation_config=metadata["generation_config"],
                text=checkpoints.read_text_assets(path),
                checkpoint=None,
            )
        checkpoint = checkpoints.open_checkpoint(path)
        return cls(
            path=path,
            config=checkpoint.config,
            generation_config=checkpoint.generation_config,
            text=checkpoint.text,
            checkpoint=checkpoint,
        )

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer."""
        return Tokenizer.from_assets(self.text, dict(self.config), dict(self.generation_config))


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
    model_config = family_of(source.config).config(source.config)
    check_divisible(model_config, config.tensor_parallel_size)
    mesh = make_mesh(config.tensor_parallel_size)
    config = resolve(config, model_config)
    tokenizer = (
        ModelSource.open(config.tokenizer) if config.tokenizer else source
    ).tokenizer()
    with _progress(progress) as stage:
        model, parameters = load_model(
            source, model_config, mesh, jnp.dtype(config.dtype), stage("Loading weights")
        )
        runner = ModelRunner(model_config, model, parameters, mesh, runner_config(config))
        if config.warmup:
            runner.warmup(stage("Compiling"))
    guard = CompileGuard()
    engine = Engine(
        config,
        runner,
        vocab_size=model_config.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        guard=guard,
    )
    return LoadedModel(
        engine=engine,
        tokenizer=tokenizer,
        config=config,
        model_config=model_config,
        name=config.served_model_name or _display_name(config.model, source.path),
        generation_config=source.generation_config,
    )


def load_model(
    source: ModelSource,
    model_config: ModelConfig,
    mesh: jax.sharding.Mesh,
    dtype: Any,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Transformer, dict[str, jax.Array]]:
    """Return the abstract model and its parameters by dotted path, each in its sharding."""
    model = nnx.eval_shape(lambda: Transformer(model_config, dtype))
    _, state = nnx.split(model)
    abstract = flat_parameters(state)
    shardings = parameter_shardings(mesh, abstract)
    if source.checkpoint is None:
        targets = {
            path: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shardings[path])
            for path, p in abstract.items()
        }
        return model, checkpoints.restore_tree(source.path, targets)
    family = family_of(source.config)
    return model, load_weights(
        source.checkpoint, family, model_config, state, shardings, on_progress
    )


def resolve(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Replace every "auto" and None that stands for a number by its value.

    Raises:
        ConfigError: The KV memory does not hold one sequence of the length asked for.
    """
    platform = jax.default_backend()
    dtype = config.dtype
    if dtype == "auto":
        # XLA:CPU multiplies thin bfloat16 batches 15 times slower than float32.
        dtype = "float32" if platform == "cpu" else "bfloat16"
    shape = CacheShape(
        num_layers=model_config.num_hidden_layers,
        num_kv_heads=model_config.num_key_value_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size,
        dtype=dtype,
    )
    longest = model_config.max_position_embeddings
    if config.max_model_len and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {longest} positions that the model "
            "was made for"
        )
    wanted = config.max_model_len or longest
    pages_each = -(-wanted // config.page_size)
    num_pages = config.num_pages
    if num_pages is None:
        most = config.max_num_seqs * pages_each  # more could never be in use at once
        budget = config.kv_cache_memory_bytes or cache_bytes(pages_each * shape.page_bytes)
        # Page bytes are those of all devices together, as is what the budget buys.
        num_pages = min(most, budget * config.tensor_parallel_size // shape.page_bytes)
    if num_pages < pages_each:
        room = num_pages * config.page_size
        if config.max_model_len or room < 2:
            raise ConfigError(
                f"a sequence of max_model_len={wanted} tokens needs {pages_each} pages of "
                f"{shape.page_bytes / 2**20:.2f} MiB, but there are {num_pages}; lower "
                "max_model_len, or raise num_pages or kv_cache_memory_bytes"
            )
        logger.warning("max_model_len lowered from %d to %d: that is what the pages hold", wanted, room)
        wanted = room
    resolved = dataclasses.replace(
        config, dtype=dtype, max_model_len=wanted, num_pages=num_pages
    )
    logger.info(
        "%s, max_model_len %d, %d pages of %d tokens (%.2f GiB)",
        dtype,
        wanted,
        num_pages,
        config.page_size,
        num_pages * shape.page_bytes / 2**30,
    )
    return resolved


def runner_config(config: EngineConfig) -> RunnerConfig:
    """The shapes that a resolved config asks the runner for."""
    assert config.max_model_len and config.num_pages, "the config must be resolved"
    return RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_logprobs=config.max_logprobs,
        dtype=jnp.dtype(config.dtype),
    )


def _display_name(asked: str | None, path: Path) -> str:
    if asked is None:
        return checkpoints.DEFAULT_NAME
    is_local = Path(asked).expanduser().exists()
    return path.resolve().stem if is_local and path.is_file() else (path.resolve().name if is_local else asked)


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
