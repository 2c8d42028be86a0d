"""`jaxinfer run-batch` and `jaxinfer ray-batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.cli_options import engine_options, environment_variable, record_options
from jaxinfer.config import EngineConfig
from jaxinfer.config_file import ConfigFile
from jaxinfer.errors import ConfigError
from jaxinfer.server.options import ServerOptions
from jaxinfer.terminal import FAILED_EXIT_CODE, INTERRUPTED_EXIT_CODE

# A batch has no network; what remains says how requests are answered.
_FOR_BATCHES = ("pooling", "trust_request_chat_template", "otlp_traces_endpoint")
_NOT_FOR_BATCHES = tuple(
    f.name for f in dataclasses.fields(ServerOptions) if f.name not in _FOR_BATCHES
)


@record_options("options", ServerOptions, leave_out=_NOT_FOR_BATCHES)
@engine_options(
    leave_out=(
        *("max_waiting", "logits_processors"),
        *("num_hosts", "host_rank", "coordinator_address", "host_timeout_s"),
    )
)
def run_batch(
    *,
    source: Annotated[
        Path, typer.Option("--input", "-i", help="Requests, in the format of OpenAI's Batch API.")
    ],
    destination: Annotated[
        Path, typer.Option("--output", "-o", help="Answers. If it exists, the run goes on with it.")
    ],
    config: EngineConfig,
    options: ServerOptions,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Requests at work at once.  [default: twice max_num_seqs]",
            min=1,
            envvar=environment_variable("concurrency"),
        ),
    ] = None,
    config_file: ConfigFile = None,
) -> None:
    """Answer a file of requests, as fast as the machine can.

    A run that was cut off, by whatever, goes on where it was when the same command is given again.
    The exit code is 1 if any line of the output tells of an error.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from jaxinfer.server.run_batch import BatchProgress
    from jaxinfer.server.run_batch import run_batch as run

    def load() -> Any:
        from jaxinfer import loading

        return loading.load_replicas(config.for_throughput(), progress=True)

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("Answering", total=None)

        def show(progress: BatchProgress) -> None:
            bars.update(task, completed=progress.done, total=progress.total)

        try:
            end = run(
                source,
                destination,
                load,
                options=options,
                concurrency=concurrency,
                on_progress=show,
            )
        except KeyboardInterrupt:
            bars.stop()
            typer.echo("stopped; the same command goes on from here", err=True)
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    typer.echo(f"wrote {destination}: {end.done} answers, {end.failed} of them errors")
    if end.failed:
        raise typer.Exit(FAILED_EXIT_CODE)


@record_options("options", ServerOptions, leave_out=_NOT_FOR_BATCHES)
@engine_options(
    leave_out=("max_waiting", "num_hosts", "host_rank", "coordinator_address", "host_timeout_s")
)
def ray_batch(
    *,
    source: Annotated[
        Path,
        typer.Option("--input", "-i", help="Requests, as for run-batch; every node reads it."),
    ],
    destination: Annotated[
        Path,
        typer.Option("--output", "-o", help="A folder. If it exists, the run goes on with it."),
    ],
    config: EngineConfig,
    options: ServerOptions,
    num_replicas: Annotated[int, typer.Option(help="Engines at work.", min=1)] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of each engine.", min=0)] = 0.0,
    cpus: Annotated[float, typer.Option(help="CPU cores of each engine.", min=0)] = 1.0,
    lines_per_shard: Annotated[int, typer.Option(help="Lines done at one go.", min=1)] = 1000,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster.  [default: this machine]")
    ] = None,
    config_file: ConfigFile = None,
) -> None:
    """Answer a file of requests on a Ray cluster (extra "ray"), millions of them if need be.

    A run that was cut off goes on when the same command is given again. The exit code is 1 if any
    of the lines answered now tells of an error.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("ray-batch needs Ray: pip install 'jaxinfer[ray]'") from None
    from jaxinfer.cluster.batch import ray_batch as run

    ray.init(address, log_to_driver=False)
    try:
        end = run(
            source,
            destination,
            config,
            options=options,
            num_replicas=num_replicas,
            num_gpus=gpus,
            num_cpus=cpus,
            lines_per_shard=lines_per_shard,
        )
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    finally:
        ray.shutdown()
    typer.echo(
        f"wrote {destination}: {end.done} answers, {end.failed} of them errors; "
        f"{end.skipped} of {end.shards} shards were there"
    )
    if end.failed:
        raise typer.Exit(FAILED_EXIT_CODE)
