"""Flags made from the config record, so that the two cannot drift. Knows no command."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from jaxinfer.config import EngineConfig


def attribute_docs(record: type) -> dict[str, str]:
    """Return what the `Attributes:` section of a record's docstring says of each field."""
    docs: dict[str, str] = {}
    name = ""
    _, _, section = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")
    for line in section.splitlines():
        if not line.startswith("    "):
            break
        if line.startswith("        "):
            docs[name] += " " + line.strip()
        else:
            name, _, text = line.strip().partition(": ")
            docs[name] = text
    return docs


def engine_options(
    *, leave_out: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command one flag per field of `EngineConfig`.

    The command takes `config`; names, types, defaults and help texts come from the record, so the
    flags cannot drift from it.

    Args:
        leave_out: Fields that make no sense for the command; they keep the record's default.
        defaults: Defaults that differ from the record's.
    """
    types = typing.get_type_hints(EngineConfig)
    docs = attribute_docs(EngineConfig)
    flags = []
    for field in dataclasses.fields(EngineConfig):
        if field.name in leave_out:
            continue
        names = [f"--{field.name.replace('_', '-')}"]
        if field.type == "bool":
            names = [f"{names[0]}/--no-{names[0][2:]}"]
        if field.name == "model":
            names.append("-m")
        # Backquotes are for the reader of the source; a terminal shows them as noise.
        option = typer.Option(*names, help=docs[field.name].replace("`", ""))
        flags.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, field.default),
                annotation=Annotated[types[field.name], option],
            )
        )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "config"]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            settings = {flag.name: values.pop(flag.name) for flag in flags}
            command(config=EngineConfig(**settings), **values)

        run.__signature__ = signature.replace(parameters=[*own, *flags])  # pyrefly: ignore
        run.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
        return run

    return decorate
