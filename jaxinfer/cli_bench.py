"""`jaxinfer bench`: flags in, a table on stdout, the same figures as JSON or as a page.

Knows how to ask and how to show; what is measured stands in `jaxinfer.bench`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.cli_options import engine_options
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure speed: of batches, of a server, of starting, of the scheduler.",
)

Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a page with plots to this file (extra: bench)."),
]
PromptTokens = Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)]
NewTokens = Annotated[int, typer.Option(help="Tokens of each answer.", min=1)]

# Follow from the workload.
_OF_THE_WORKLOAD = ("max_num_seqs", "max_model_len", "enable_prefix_caching", "max_waiting")
_NOT_FOR_SPEED = ("seed", "served_model_name", "scheduling_policy", "warmup", "max_logprobs")


@bench.command()
@engine_options(leave_out=(*_OF_THE_WORKLOAD, *_NOT_FOR_SPEED))
def offline(
    *,
    config: EngineConfig,
    batch: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,8,16,32",
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 64,
    repeats: Annotated[int, typer.Option(help="Medians are of so many runs.", min=1)] = 3,
    json_path: Json = None,
    html_path: Html = None,
) -> None:
    """Prefill and decode rates of whole batches through the Python API.

    Beside them stands how much of what the machine can do they are.
    """
    import dataclasses

    from jaxinfer import loading
    from jaxinfer.bench.offline import offline_table, run_offline

    batches = _numbers(batch)
    longest = prompt_tokens + new_tokens + 1
    config = dataclasses.replace(
        config,
        max_num_seqs=max(batches),
        max_model_len=longest,
        enable_prefix_caching=False,
        warmup=False,  # only what the workload needs is compiled, before it is timed
        max_num_batched_tokens=max(config.max_num_batched_tokens, *batches),
    ).for_throughput()
    loaded = loading.load(config)
    try:
        result = run_offline(
            loaded,
            batches=batches,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            on_progress=_tell,
        )
    finally:
        loaded.engine.close()
    _show(offline_table(result), result, json_path, html_path)


@bench.command()
@engine_options(leave_out=_NOT_FOR_SPEED)
def serve(
    *,
    config: EngineConfig,
    url: Annotated[
        str | None,
        typer.Option(help="Load this server. Without one, `jaxinfer serve` is started and ended."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Load this OpenAI-compatible server in turn. May be given several times."
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="For all servers.")] = None,
    requests: Annotated[int, typer.Option(help="Requests a round.", min=1)] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Most requests in flight (closed loop).  [default: no limit]", min=1),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, Poisson (open loop).  [default: all at once]"),
    ] = None,
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 64,
    shared_tokens: Annotated[
        int, typer.Option(help="Leading tokens that all prompts share.", min=0)
    ] = 0,
    text_prompts: Annotated[
        bool, typer.Option("--text-prompts", help="Send words, to servers that take no token ids.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Rounds; medians are of these.", min=1)] = 3,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="For goodput: most ms to the first token.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="For goodput: most ms a token after it.")
    ] = None,
    slo_e2e_ms: Annotated[
        float | None, typer.Option(help="For goodput: most ms to the last token.")
    ] = None,
    json_path: Json = None,
    html_path: Html = None,
) -> None:
    """Latency, throughput and goodput of a server under load.

    Engine settings are for the server that is started; with --url there is none.
    """
    from contextlib import nullcontext

    try:
        from jaxinfer.bench.load import Target
    except ImportError as error:
        raise ConfigError('the client needs httpx: pip install "jaxinfer[bench]"') from error
    from jaxinfer.bench.serve import Objective, run_serve, serve_table
    from jaxinfer.bench.server_process import own_server
    from jaxinfer.bench.workload import Workload

    work = Workload(
        num_requests=requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        shared_tokens=shared_tokens,
    )
    if rate is not None and rate <= 0:
        raise ConfigError(f"--rate must be above 0, got {rate}")
    _tell("waiting for the server")
    with nullcontext(url) if url else own_server(config) as ours:
        others = {other: Target(url=other, api_key=api_key) for other in compare or ()}
        result = run_serve(
            {"jaxinfer" if url is None else url: Target(url=ours, api_key=api_key), **others},
            work,
            concurrency=concurrency,
            rate=rate,
            repeats=repeats,
            objective=Objective(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms, e2e_ms=slo_e2e_ms),
            text_prompts=text_prompts,
            on_progress=_tell,
        )
    _show(serve_table(result), result, json_path, html_path)


@bench.command()
@engine_options(leave_out=(*_NOT_FOR_SPEED, "compilation_cache_dir"))
def startup(
    *,
    config: EngineConfig,
    prompt: Annotated[str, typer.Option(help="What to answer.")] = "The capital of France is",
    repeats: Annotated[int, typer.Option(help="Later starts.", min=1)] = 3,
    json_path: Json = None,
    html_path: Html = None,
) -> None:
    """Seconds from a process's start to its first token: the first time, and later."""
    from jaxinfer.bench.startup import run_startup, startup_table

    result = run_startup(config, prompt=prompt, repeats=repeats, on_progress=_tell)
    _show(startup_table(result), result, json_path, html_path)


@bench.command()
def scheduler(
    *,
    requests: Annotated[int, typer.Option(help="Running requests.", min=1)] = 256,
    prompt_tokens: PromptTokens = 200,
    steps: Annotated[int, typer.Option(help="Medians are of so many.", min=1)] = 300,
    dispatch: Annotated[
        bool,
        typer.Option("--dispatch", help="Load the default model too, and time calls of its step."),
    ] = False,
    json_path: Json = None,
    html_path: Html = None,
) -> None:
    """Host time of a step with many running requests, without a model."""
    from jaxinfer.bench.scheduler import run_dispatch, run_scheduler, scheduler_table

    result = run_scheduler(num_requests=requests, prompt_tokens=prompt_tokens, num_steps=steps)
    if dispatch:
        from jaxinfer import loading
        from jaxinfer.model_runner import ModelRunner

        loaded = loading.load(EngineConfig())
        runner = loaded.engine.runner
        assert isinstance(runner, ModelRunner), "a loaded model runs on a device"
        result["dispatch"] = run_dispatch(runner, steps)
        loaded.engine.close()
    _show(scheduler_table(result), result, json_path, html_path)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"expected whole numbers of at least 1, separated by commas, got {text!r}"
        )
    return numbers


def _tell(what: str) -> None:
    typer.echo(f"{what} ...", err=True)


def _show(table: str, result: dict[str, Any], json_path: Path | None, html: Path | None) -> None:
    typer.echo(table)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    if html is not None:
        from jaxinfer.bench.report import write_report

        write_report(html, [result])
