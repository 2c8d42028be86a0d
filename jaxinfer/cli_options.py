"""Flags made from the records of settings, so that the two cannot drift. Knows no command.

A value comes from the flag, else from the environment variable, else from the file that `--config`
names, else from the record's default.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from jaxinfer.config import EngineConfig

ENVIRONMENT_PREFIX = "JAXINFER_"


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


def environment_variable(name: str) -> str:
    """Return the variable that stands for a setting."""
    return ENVIRONMENT_PREFIX + name.upper()


def examples(*lines: str) -> str:
    """Return the epilog of a command's help: lines to paste."""
    # A line of nothing but a backspace keeps the help formatter from joining the lines after it.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def engine_options(
    *, leave_out: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return `record_options` for `EngineConfig`; the command takes `config`."""
    return record_options("config", EngineConfig, leave_out=leave_out, **defaults)


def record_options(
    parameter: str, record: type[Any], *, leave_out: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command one flag per field of a record of settings.

    Names, types, defaults and help texts come from the record, so the flags cannot drift from it.

    Args:
        parameter: How the command calls the record that is made from the flags.
        record: A frozen dataclass with an `Attributes:` section.
        leave_out: Fields that make no sense for the command; they keep the record's default.
        defaults: Defaults that differ from the record's.
    """
    docs = attribute_docs(record)
    hints = typing.get_type_hints(record)
    flags = [
        _flag(f, hints[f.name], docs[f.name], defaults.get(f.name, f.default))
        for f in dataclasses.fields(record)
        if f.name not in leave_out
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != parameter]

        @functools.wraps(command)
        def run(*args: Any, **values: Any) -> None:
            settings = {flag.name: values.pop(flag.name) for flag in flags}
            settings = {k: tuple(v) if type(v) is list else v for k, v in settings.items()}
            command(*args, **{parameter: record(**settings)}, **values)

        run.__signature__ = signature.replace(parameters=[*own, *flags])  # pyrefly: ignore
        run.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
        return run

    return decorate


def _flag(field: dataclasses.Field[Any], hint: Any, doc: str, default: Any) -> inspect.Parameter:
    names = [f"--{field.name.replace('_', '-')}"]
    if hint is bool:
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    if field.name == "model":
        names.append("-m")
    if typing.get_origin(hint) is tuple:
        hint, default = list[str], list(default)  # given several times
        doc += " May be given several times."
    # Backquotes are for the reader of the source; a terminal shows them as noise.
    option = typer.Option(
        *names,
        help=doc.replace("`", ""),
        envvar=environment_variable(field.name),
        show_default=_shows_default(default),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, option],
    )


def _shows_default(default: Any) -> bool:
    return not isinstance(default, types.NoneType) and default != []
