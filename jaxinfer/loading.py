"""From settings to a running engine: find the model, resolve what was left open, load, warm up.

The only file that knows checkpoints, models, tokenizer and engine at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import checkpoints
from jaxinfer.compilation import use_persistent_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError
from jaxinfer.hosts import Follower, Leader, LeadingEngine, LeadingRunner, join, replay
from jaxinfer.hosts.channel import STOP
from jaxinfer.hosts.facts import difference, facts
from jaxinfer.hosts.meeting import check_hosts, settings_of
from jaxinfer.hosts.messages import Message
from jaxinfer.memory import default_cache_dir
from jaxinfer.model_runner import ModelRunner
from jaxinfer.model_source import ModelSource, load_model
from jaxinfer.models import ModelConfig, Transformer, family_of, lay_out_heads
from jaxinfer.resolution import resolve, runner_config
from jaxinfer.sharding import check_experts, device_groups, log_costs, make_mesh
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


def load_replicas(config: EngineConfig, progress: bool = True) -> list[LoadedModel]:
    """Load a model `data_parallel_size` times, each on devices of its own.

    Raises:
        ConfigError, ModelError, CheckpointError: As `load`.
    """
    if config.data_parallel_size == 1:
        return [load(config, progress)]
    check_hosts(config)
    groups = device_groups(config.data_parallel_size, config.tensor_parallel_size)
    single = replace(config, data_parallel_size=1)
    loaded: list[LoadedModel] = []
    try:
        for devices in groups:
            # What the first one resolved holds for all: its pages take no room from the others'.
            settings = loaded[0].config if loaded else single
            loaded.append(load(settings, progress, devices=devices))
    except BaseException:
        for model in loaded:
            model.engine.close()
        raise
    return loaded


def load(
    config: EngineConfig, progress: bool = True, devices: Sequence[jax.Device] | None = None
) -> LoadedModel:
    """Load a model and return its engine, ready to serve.

    Args:
        config: Settings; what they leave open is resolved here, once, and logged.
        progress: Show progress bars on stderr.
        devices: Where; None for the first ones that there are.

    Raises:
        ConfigError: The settings do not go together, or with the model or device.
        HostLostError: Another host ended meanwhile.
        ModelError: The checkpoint does not fit a model that is supported.
        CheckpointError: The checkpoint was not found or is damaged.
    """
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} needs a face that holds several "
            "engines: `jaxinfer serve`, `jaxinfer run-batch` or `jaxinfer.Replicas`"
        )
    check_hosts(config)
    if config.num_hosts == 1:
        return _load(config, progress, devices, None)
    if config.host_rank:
        raise ConfigError(f"host {config.host_rank} follows: give it to `jaxinfer serve`")
    channel, config = join(config)
    assert isinstance(channel, Leader), "host 0 leads"
    try:
        # Loading waits for the others at several places, where nobody can tell that one is lost.
        return channel.watched(lambda: _load(config, progress, devices, channel))
    except BaseException:
        channel.close()
        raise


def _load(
    config: EngineConfig,
    progress: bool,
    devices: Sequence[jax.Device] | None,
    channel: Leader | None,
) -> LoadedModel:
    _keep_programs(config)
    source = ModelSource.open(config.model)
    model_config = _model_config(source, config)
    config = resolve(config, model_config)
    make_runner: Callable[..., ModelRunner] = ModelRunner
    make_engine: type[Engine] = Engine
    if channel is not None:
        told = {"config": asdict(config), "facts": facts(source.path)}
        channel.send(Message("load", text=json.dumps(told)))
        make_runner = partial(LeadingRunner, channel=channel)
        make_engine = LeadingEngine
    text = ModelSource.open(config.tokenizer) if config.tokenizer else source
    with _progress(progress) as stage, ThreadPoolExecutor(1) as beside:
        tokenizer_built = beside.submit(tokenizer_of, text)
        runner, model_config = _fill_runner(
            config, source, model_config, devices, make_runner, stage
        )
        try:
            tokenizer = tokenizer_built.result()
            if config.warmup:
                runner.warmup(stage("Compiling"))
        except BaseException:
            runner.close()
            raise
    engine = make_engine(
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


def follow(config: EngineConfig, progress: bool = True) -> None:
    """Hold this host's part of a model until host 0 says that it is over.

    Args:
        config: As host 0's but for `host_rank` and places on disk; what else differs is taken from
            host 0.
        progress: Show progress bars on stderr.

    Raises:
        ConfigError, ModelError, CheckpointError: As `load`.
        HostLostError: Host 0 ended before anything was loaded.
    """
    channel, config = join(config)
    assert isinstance(channel, Follower), "host 0 loads, the others follow"
    try:
        message = channel.next()
        if message.word == STOP:
            return  # host 0 could not load
        told = json.loads(message.text)
        config = settings_of(told["config"], config)
        _keep_programs(config)
        source = ModelSource.open(config.model)
        if differing := difference(facts(source.path), told["facts"]):
            raise ConfigError(f"this host is not like host 0: {differing}; make them the same")
        _follow(config, source, channel, progress)
    except Exception as error:
        channel.fail(str(error))
        raise
    finally:
        channel.close()


def _follow(config: EngineConfig, source: ModelSource, channel: Follower, progress: bool) -> None:
    model_config = _model_config(source, config)
    with _progress(progress) as stage:
        runner, _ = _fill_runner(config, source, model_config, None, ModelRunner, stage)
        try:
            if config.warmup:
                runner.finish_warmup(stage("Compiling"))
            channel.answer()
            replay(runner, channel)
        finally:
            runner.close()


def _fill_runner(
    config: EngineConfig,
    source: ModelSource,
    model_config: ModelConfig,
    devices: Sequence[jax.Device] | None,
    make_runner: Callable[..., ModelRunner],
    stage: Callable[[str], Callable[[int, int], None]],
) -> tuple[ModelRunner, ModelConfig]:
    """Return a runner with its weights, and the model as it is for the config's length."""
    assert config.max_model_len, "the config is resolved"
    model_config = model_config.for_length(config.max_model_len)
    mesh = make_mesh(config.tensor_parallel_size, devices, expert_parallel=config.expert_parallel)
    log_costs(model_config, mesh)
    runners: list[ModelRunner] = []

    def on_model(model: Transformer, parameters: dict[str, Any]) -> None:
        shapes = runner_config(config, model_config)
        runners.append(make_runner(model_config, model, parameters, mesh, shapes))
        if config.warmup:
            # While the weights are read. Hosts wait for each other's programs, all of them.
            runners[0].start_compiling(all_first=config.num_hosts > 1)

    try:
        _, parameters = load_model(
            source,
            model_config,
            mesh,
            jnp.dtype(config.dtype),
            quantization=config.quantization,
            kernels=config.kernels,
            on_progress=stage("Loading weights"),
            on_model=on_model,
        )
        (runner,) = runners
        runner.fill(parameters)
    except BaseException:
        for runner in runners:
            runner.close()
        raise
    return runner, model_config


def _model_config(source: ModelSource, config: EngineConfig) -> ModelConfig:
    """Return the model's sizes, with its heads laid out for the devices."""
    model_config = family_of(source.config).translate(source.config)
    check_experts(model_config, config.tensor_parallel_size, config.expert_parallel)
    return lay_out_heads(model_config, config.tensor_parallel_size)


def _keep_programs(config: EngineConfig) -> None:
    cache_dir = config.compilation_cache_dir
    if cache_dir != "":
        use_persistent_cache(Path(cache_dir) if cache_dir else default_cache_dir())


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
