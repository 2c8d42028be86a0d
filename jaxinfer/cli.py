"""The command line: words and flags in, calls of the other faces out. Nothing is computed here.

Everything heavy is imported inside the command that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jaxinfer.cli_batches import ray_batch, run_batch
from jaxinfer.cli_bench import bench
from jaxinfer.cli_eval import evaluate
from jaxinfer.cli_options import engine_options, examples, record_options
from jaxinfer.cli_talk import chat, generate
from jaxinfer.config import EngineConfig
from jaxinfer.config_file import ConfigFile
from jaxinfer.errors import JaxinferError
from jaxinfer.server.options import ServerOptions
from jaxinfer.terminal import BAD_INPUT_EXIT_CODE, FAILED_EXIT_CODE, OutputError, show_error


class _Commands(TyperGroup):
    """Commands whose expected errors end in one line on stderr, never in a trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OutputError as error:
            show_error(error)
            raise typer.Exit(FAILED_EXIT_CODE) from None
        except (JaxinferError, ValueError) as error:
            if not _is_expected(error):
                raise
            show_error(error)
            raise typer.Exit(BAD_INPUT_EXIT_CODE) from None


app = typer.Typer(
    name="jaxinfer",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    # Plain help: rich's tables cut long flags ("--max-num-batched-t…") and take twice the time.
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")
app.command("eval")(evaluate)

# What serving needs to know, and memory does not depend on.
_NOT_FOR_PLANS = (
    *("tokenizer", "seed", "max_waiting", "served_model_name", "scheduling_policy", "warmup"),
    *("overlap", "enable_prefix_caching", "compilation_cache_dir", "kernels", "num_window_pages"),
)


@app.callback()
def main() -> None:
    """Serve and use language models with JAX.

    Every command explains itself: jaxinfer serve --help
    """


@app.command(
    epilog=examples(
        "jaxinfer serve",
        "jaxinfer serve --model path/to/model.gguf --port 9000",
        "jaxinfer serve --model path/to/folder --max-num-seqs 8 --max-model-len 2048",
        "jaxinfer serve --config server.yaml --api-key-file keys.txt",
    )
)
@record_options("options", ServerOptions)
# No request over HTTP can name a logits processor.
@engine_options(leave_out=("logits_processors",))
def serve(*, config: EngineConfig, options: ServerOptions, config_file: ConfigFile = None) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it."""
    from jaxinfer.server.run import serve as run_server

    run_server(config, options)


app.command(
    epilog=examples(
        'jaxinfer generate "What is the capital of France?"',
        'jaxinfer generate "Once upon a time" --raw --max-tokens 64 --temperature 0.8 --seed 7',
        "jaxinfer generate - < question.txt",
    )
)(generate)
app.command(
    epilog=examples(
        "jaxinfer chat",
        'jaxinfer chat --model path/to/model.gguf --system "Answer in one sentence."',
    )
)(chat)
app.command(
    "run-batch",
    epilog=examples(
        "jaxinfer run-batch -i requests.jsonl -o answers.jsonl",
        "jaxinfer run-batch -i requests.jsonl -o answers.jsonl --model path/to/model.gguf",
    ),
)(run_batch)
app.command(
    "ray-batch",
    epilog=examples(
        "jaxinfer ray-batch -i requests.jsonl -o answers --num-replicas 8 --gpus 1",
    ),
)(ray_batch)


@app.command(epilog=examples("jaxinfer convert path/to/model.gguf path/to/folder"))
def convert(
    source: Annotated[str, typer.Argument(help="A file, a folder or a hub id.", metavar="SRC")],
    destination: Annotated[
        Path, typer.Argument(help="The folder to make; must not exist.", metavar="DST")
    ],
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "bfloat16",
) -> None:
    """Write a model in the engine's own layout, which loads fast and shards on reading."""
    from rich.console import Console
    from rich.progress import Progress

    from jaxinfer.convert import convert as run

    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task("Converting", total=None)
        run(
            source,
            str(destination),
            dtype=dtype,
            on_progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
    typer.echo(f"wrote {destination}; try: jaxinfer serve --model {destination}")


@app.command(
    epilog=examples(
        "jaxinfer plan --model llama-3-70b --topology h100:8",
        "jaxinfer plan --model deepseek-v3 --topology h100:16 --max-model-len 32768 --json",
        "jaxinfer plan --model path/to/folder --topology l4:2 --estimate",
    )
)
@engine_options(leave_out=_NOT_FOR_PLANS)
def plan(
    *,
    config: EngineConfig,
    topology: Annotated[str, typer.Option(help="Devices, as CHIP:COUNT, such as h100:8.")],
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Ask no compiler for temporaries, which takes minutes."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Tell what a model takes of each device's memory, without the devices and its weights.

    --model also takes a config.json and the names llama-3-8b, llama-3-70b and deepseek-v3. Without
    --tensor-parallel-size all devices share each layer. The exit code is 1 if it does not fit.
    """
    import json

    from jaxinfer.plan_compile import plan_memory
    from jaxinfer.plan_table import plan_table

    found = plan_memory(config, topology, compiled=not estimate)
    typer.echo(json.dumps(found.to_json(), indent=1) if as_json else plan_table(found))
    if not found.fits:
        raise typer.Exit(FAILED_EXIT_CODE)


@app.command()
def models() -> None:
    """List the models at hand and the architectures that are supported."""
    from checkpoints import installed_models
    from jaxinfer.models import supported_families

    found = installed_models()
    typer.echo("installed models:" if found else "no model is installed")
    for model in found:
        typer.echo(f"  {model.name} ({model.size_bytes / 1e6:.0f} MB, {model.origin})")
        typer.echo(f"    {model.path}")
    typer.echo("supported architectures:")
    for family in supported_families():
        typer.echo(f"  {family.name}: {', '.join(family.architectures)}")
        for example in family.examples:
            typer.echo(f"    {example}")


@app.command()
def version() -> None:
    """Print the versions of jaxinfer and of what it stands on."""
    typer.echo(f"Python {sys.version.split()[0]}")
    for package in ("jaxinfer", "jax", "jaxlib", "flax", "numpy"):
        try:
            typer.echo(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # run from a folder that was never installed
            typer.echo(f"{package} (not installed as a package)")


def _is_expected(error: Exception) -> bool:
    """Whether the error is one of ours; `checkpoints` is loaded if one of its errors is raised."""
    checkpoints = sys.modules.get("checkpoints")
    return isinstance(error, JaxinferError) or (
        checkpoints is not None and isinstance(error, checkpoints.CheckpointError)
    )
