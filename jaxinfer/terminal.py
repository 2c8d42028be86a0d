"""One person at a terminal: answers that stream, a line of figures, and turns of a conversation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

import typer

from jaxinfer.errors import InvalidRequestError, JaxinferError

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.outputs import RequestMetrics, RequestOutput
    from jaxinfer.sampling_params import SamplingParams

# How a command ended, for the shell.
FAILED_EXIT_CODE = 1
BAD_INPUT_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

Messages = list[dict[str, str]]


class OutputError(JaxinferError):
    """The answer cannot be written: the disk behind stdout is full, or something like it."""


async def stream(
    engine: AsyncEngine, asked: str | Messages, params: SamplingParams
) -> AsyncIterator[RequestOutput]:
    """Yield the answer to a text or a conversation, cut where the context ends.

    An engine refuses `max_tokens` that do not fit; at a terminal nobody wants to count them.

    Raises:
        InvalidRequestError: It cannot be served as asked.
    """
    if isinstance(asked, str):
        prompt = {"prompt": asked, "prompt_token_ids": await engine.encode(asked)}
    else:
        prompt = cast("dict[str, Any]", await engine.chat_prompt(asked))
    room = engine.max_model_len - len(prompt["prompt_token_ids"])
    if params.max_tokens is not None and room >= 1:
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
    async for output in engine.generate(prompt, params, delta=True):
        yield output


class Answer:
    """An answer on its way to the terminal, and what is known of it once it stands there."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.metrics: RequestMetrics | None = None

    def show(self, outputs: AsyncIterator[RequestOutput]) -> bool:
        """Print the text as it comes; return whether ctrl-C ended it.

        asyncio turns the first ctrl-C into a cancellation, which aborts the request.

        Raises:
            InvalidRequestError: It cannot be served as asked.
            OutputError: It cannot be written.
        """
        try:
            asyncio.run(self._print(outputs))
        except KeyboardInterrupt:
            return True
        finally:
            with contextlib.suppress(OSError):  # the first failure to write is the one to tell of
                typer.echo()
        return False

    def show_speed(self) -> None:
        """Print time to first token and decode speed to stderr."""
        times = self.metrics
        if times is None or times.first_token_time is None or times.last_token_time is None:
            return
        parts = [
            f"{self.num_tokens} tokens",
            f"first after {times.first_token_time - times.arrival_time:.3f} s",
        ]
        decode_s = times.last_token_time - times.first_token_time
        if decode_s > 0:
            parts.append(f"then {(self.num_tokens - 1) / decode_s:.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append("cut at the limit")
        typer.echo(", ".join(parts), err=True)

    async def _print(self, outputs: AsyncIterator[RequestOutput]) -> None:
        async for output in outputs:
            self.metrics = output.metrics
            for sample in output.outputs:
                self.text += sample.text
                self.num_tokens += len(sample.token_ids)
                self.finish_reason = sample.finish_reason
                _write(sample.text)
                if sample.error is not None:
                    typer.secho(f"\nerror: {sample.error}", err=True, fg=typer.colors.RED)


def _write(text: str) -> None:
    try:
        typer.echo(text, nl=False)
    except BrokenPipeError:  # the reader has had enough, as `head` does
        raise
    except OSError as error:
        raise OutputError(f"the answer cannot be written: {error.strerror or error}") from error


def take_turn(
    engine: AsyncEngine, messages: Messages, question: str, params: SamplingParams
) -> Messages:
    """Answer the question; return the conversation with both, or as it was if that fails."""
    asked = [*messages, {"role": "user", "content": question}]
    answer = Answer()
    try:
        answer.show(stream(engine, asked, params))
    except InvalidRequestError as error:
        show_error(error)
        typer.echo("(/reset forgets the conversation)", err=True)
        return messages
    return [*asked, {"role": "assistant", "content": answer.text}]


def read_prompt() -> str:
    """Return all of stdin.

    Raises:
        InvalidRequestError: It is closed, empty or no text.
    """
    try:
        text = sys.stdin.read() if sys.stdin is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"stdin cannot be read as text: {error}", "prompt") from error
    if not text:
        raise InvalidRequestError(
            "there is no prompt on stdin: it is closed or empty; pipe a text in, or give the "
            "prompt as an argument",
            "prompt",
        )
    return text


def read_line() -> str:
    """Return the next line of the user; the end of input is "/exit", ctrl-C an empty line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its history and line editing
    try:
        return input("> ").strip()
    except UnicodeDecodeError as error:
        show_error(error)
        return ""
    except (EOFError, OSError, RuntimeError):  # at its end, or never open
        typer.echo()
        return "/exit"
    except KeyboardInterrupt:
        typer.echo()
        return ""


def conversation(system: str | None, question: str | None = None) -> Messages:
    """Return the messages of what was said, leaving out what was not."""
    spoken = {"system": system, "user": question}
    return [{"role": role, "content": text} for role, text in spoken.items() if text is not None]


def show_error(error: Exception) -> None:
    """Print one line to stderr."""
    typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
