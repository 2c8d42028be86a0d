"""`jaxinfer generate` and `jaxinfer chat`: flags in, one person's answers out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from jaxinfer.cli_options import engine_options
from jaxinfer.config import EngineConfig
from jaxinfer.errors import InvalidRequestError
from jaxinfer.terminal import (
    FAILED_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    Answer,
    conversation,
    read_line,
    read_prompt,
    stream,
    take_turn,
)

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.sampling_params import SamplingParams

# One person at a terminal: one sequence at a time, and no need for what a server needs.
_SINGLE_USER: dict[str, Any] = {
    "leave_out": (
        *("seed", "max_waiting", "served_model_name", "scheduling_policy", "max_logprobs"),
        *("data_parallel_size", "num_hosts", "host_rank", "coordinator_address"),
        *("host_timeout_s", "logits_processors"),
    ),
    "max_num_seqs": 1,
}

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
