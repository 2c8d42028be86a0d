"""The command line: words and flags in, calls of the other faces out. Nothing is computed here.

Everything heavy is imported inside the command that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Generator
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from jaxinfer.cli_bench import bench
from jaxinfer.cli_eval import evaluate
from jaxinfer.cli_options import engine_options, environment_variable, record_options
from jaxinfer.config import EngineConfig
from jaxinfer.config_file import ConfigFile
from jaxinfer.errors import ConfigError, InvalidRequestError, JaxinferError
from jaxinfer.server.options import ServerOptions
from jaxinfer.terminal import (
    Answer,
    OutputError,
    conversation,
    read_line,
    read_prompt,
    show_error,
    stream,
    take_turn,
)

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.sampling_params import SamplingParams

FAILED_EXIT_CODE = 1
BAD_INPUT_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130


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


def _examples(*lines: str) -> str:
    # A line of nothing but a backspace keeps the help formatter from joining the lines after it.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


# One person at a terminal: one sequence at a time, and no need for what a server needs.
_SINGLE_USER: dict[str, Any] = {
    "leave_out": (
        *("seed", "max_waiting", "served_model_name", "scheduling_policy", "max_logprobs"),
        *("data_parallel_size", "num_hosts", "host_rank", "coordinator_address"),
        *("host_timeout_s", "logits_processors"),
    ),
    "max_num_seqs": 1,
}

# A batch has no network; what remains says how requests are answered.
_FOR_BATCHES = ("pooling", "trust_request_chat_template", "otlp_traces_endpoint")
_NOT_FOR_BATCHES = tuple(
    f.name for f in dataclasses.fields(ServerOptions) if f.name not in _FOR_BATCHES
)

# What serving needs to know, and memory does not depend on.
_NOT_FOR_PLANS = (
    *("tokenizer", "seed", "max_waiting", "served_model_name", "scheduling_policy", "warmup"),
    *("overlap", "enable_prefix_caching", "compilation_cache_dir", "kernels", "num_window_pages"),
)

MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token.  [default: the model's, or 0]")
]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the likeliest tokens up to this probability.  [default: the model's]"),
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
System = Annotated[str | None, typer.Option(help="A system message in front.")]


@app.callback()
def main() -> None:
    """Serve and use language models with JAX.

    Every command explains itself: jaxinfer serve --help
    """


@app.command(
    epilog=_examples(
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


@app.command(
    epilog=_examples(
        'jaxinfer generate "What is the capital of France?"',
        'jaxinfer generate "Once upon a time" --raw --max-tokens 64 --temperature 0.8 --seed 7',
        "jaxinfer generate - < question.txt",
    )
)
@engine_options(**_SINGLE_USER)
def generate(
    prompt: Annotated[str, typer.Argument(help="The question, or - to read it from stdin.")],
    *,
    config: EngineConfig,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or continue it as it stands."
            "  [default: chat, if the model has a template]",
        ),
    ] = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
) -> None:
    """Answer one prompt: stream the text, then tell how fast it was.

    The text goes to stdout, everything else to stderr.
    """
    if system is not None and chat is False:
        raise InvalidRequestError("--system needs a chat template; leave out --raw", "system")
    flags = _sampling_flags(max_tokens, temperature, top_p, seed)
    if prompt == "-":
        prompt = read_prompt()
    with _engine(config) as engine:
        params = _sampling_params(engine, flags)
        in_template = engine.tokenizer.has_chat_template if chat is None else chat
        asked = conversation(system, prompt) if in_template else prompt
        answer = Answer()
        interrupted = answer.show(stream(engine, asked, params))
    answer.show_speed()
    if interrupted:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    if answer.finish_reason == "error":
        raise typer.Exit(FAILED_EXIT_CODE)


@app.command(
    epilog=_examples(
        "jaxinfer chat",
        'jaxinfer chat --model path/to/model.gguf --system "Answer in one sentence."',
    )
)
@engine_options(**_SINGLE_USER)
def chat(
    *,
    config: EngineConfig,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
) -> None:
    """Talk with a model that remembers what was said.

    /reset forgets the conversation, /exit or ctrl-D ends the session, ctrl-C stops an answer.
    """
    flags = _sampling_flags(max_tokens, temperature, top_p, seed)
    with _engine(config) as engine:
        params = _sampling_params(engine, flags)
        typer.echo(f"{engine.model_name}: /reset forgets, /exit ends, ctrl-C stops an answer")
        messages = conversation(system)
        while (line := read_line()) != "/exit":
            if line == "/reset":
                messages = conversation(system)
            elif line.startswith("/"):
                typer.echo("the commands are /reset and /exit", err=True)
            elif line:
                messages = take_turn(engine, messages, line, params)


@app.command(
    "run-batch",
    epilog=_examples(
        "jaxinfer run-batch -i requests.jsonl -o answers.jsonl",
        "jaxinfer run-batch -i requests.jsonl -o answers.jsonl --model path/to/model.gguf",
    ),
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

        return loading.load_replicas(config, progress=True)

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


@app.command(
    "ray-batch",
    epilog=_examples(
        "jaxinfer ray-batch -i requests.jsonl -o answers --num-replicas 8 --gpus 1",
    ),
)
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


@app.command(epilog=_examples("jaxinfer convert path/to/model.gguf path/to/folder"))
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
    epilog=_examples(
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


@contextlib.contextmanager
def _engine(config: EngineConfig) -> Generator[AsyncEngine]:
    from jaxinfer.async_engine import AsyncEngine

    loading: Future[AsyncEngine] = Future()

    def load() -> None:
        try:
            loading.set_result(AsyncEngine.from_config(config))
        except BaseException as error:  # whatever it is, it is raised where it is waited for
            loading.set_exception(error)

    try:
        # In a thread that may be left behind: nothing interrupts a compiler.
        threading.Thread(target=load, name="jaxinfer-load", daemon=True).start()
        engine = loading.result()
    except KeyboardInterrupt:
        _exit_now(INTERRUPTED_EXIT_CODE)
    try:
        yield engine
    finally:
        engine.shutdown()


def _exit_now(code: int) -> NoReturn:
    """End without waiting for threads."""
    sys.stderr.write("\n")
    sys.stderr.flush()
    os._exit(code)


def _sampling_flags(
    max_tokens: int, temperature: float | None, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    """Return the flags that were given.

    Raises:
        InvalidRequestError: One is out of range; told before a model is loaded.
    """
    from jaxinfer.sampling_params import SamplingParams

    flags = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    SamplingParams(**given)
    return given


def _sampling_params(engine: AsyncEngine, flags: dict[str, Any]) -> SamplingParams:
    """Return the flags over the model's own recommendation; greedy, if it has none."""
    from jaxinfer.sampling_params import SamplingParams

    recommended = engine.get_default_sampling_params()
    if recommended == SamplingParams():
        flags = {"temperature": 0.0, **flags}
    return dataclasses.replace(recommended, **flags)


def _is_expected(error: Exception) -> bool:
    """Whether the error is one of ours; `checkpoints` is loaded if one of its errors is raised."""
    checkpoints = sys.modules.get("checkpoints")
    return isinstance(error, JaxinferError) or (
        checkpoints is not None and isinstance(error, checkpoints.CheckpointError)
    )
