"""A mkdocs hook: fills `<!-- reference: NAME -->` from the code, so that the pages cannot drift.

Tables of records come from their docstrings, the command line from its own help.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

MARKER = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return MARKER.sub(lambda match: TABLES[match[1]](), markdown)


def record_table(record: type) -> str:
    """Return one row per field of a dataclass: name, type, default, meaning."""
    from jaxinfer.cli_options import attribute_docs

    types, docs = typing.get_type_hints(record), attribute_docs(record)
    rows = [
        (f"`{f.name}`", f"`{_type_name(types[f.name])}`", f"`{f.default!r}`", docs[f.name])
        for f in dataclasses.fields(record)
    ]
    return _table(("field", "type", "default", "meaning"), rows)


def config() -> str:
    """Return the settings of the engine."""
    from jaxinfer.config import EngineConfig

    return record_table(EngineConfig)


def server() -> str:
    """Return the settings of the HTTP side."""
    from jaxinfer.server.options import ServerOptions

    return record_table(ServerOptions)


def sampling() -> str:
    """Return the sampling parameters."""
    from jaxinfer.sampling_params import SamplingParams

    return record_table(SamplingParams)


def processors() -> str:
    """Return the logits processors that come with the engine."""
    from jaxinfer.builtin_processors import BUILT_INS

    rows = []
    for name, make in BUILT_INS.items():
        arguments = [f"{p.name}={p.default!r}" for p in inspect.signature(make).parameters.values()]
        meaning = " ".join(inspect.cleandoc(make.__doc__ or "").split())
        rows.append((f"`{name}({', '.join(arguments)})`", meaning))
    return _table(("processor", "meaning"), rows)


def cli() -> str:
    """Return the help of every command, as a terminal shows it."""
    from typer.testing import CliRunner

    from jaxinfer.cli import app

    parts = []
    groups = [("", app), *((f"{g.name} ", g.typer_instance) for g in app.registered_groups)]
    names = [
        prefix + (command.name or command.callback.__name__)
        for prefix, group in groups
        for command in group.registered_commands
    ]
    for name in names:
        shown = CliRunner().invoke(
            app, [*name.split(), "--help"], env={"COLUMNS": "100"}, prog_name="jaxinfer"
        )
        assert shown.exit_code == 0, shown.output
        parts.append(f"## {name}\n\n```text\n{shown.output.strip()}\n```")
    return "\n\n".join(parts)


def http() -> str:
    """Return the routes, and for each the fields of a request and what becomes of them."""
    from jaxinfer.server.endpoints import ENDPOINTS
    from jaxinfer.server.field_table import FATES
    from jaxinfer.server.fields import Ignored, Refused
    from jaxinfer.server.openapi import explain

    routes = [
        (f"`{' '.join(e.methods)} {e.path}`", e.summary, "yes" if e.streams else "")
        for e in ENDPOINTS
    ]
    parts = ["## Routes", _table(("route", "what it does", "streams"), routes)]
    for endpoint in ENDPOINTS:
        if endpoint.call is None or endpoint.path == "/score":
            continue
        fates = FATES[endpoint.call.schema.endpoint]
        parts.append(f"## {endpoint.path}")
        if endpoint.path.endswith("/render"):
            parts.append("The fields are those of `/v1/chat/completions`.")
            continue
        used = [(n, f) for n, f in fates.items() if not isinstance(f, Ignored | Refused)]
        rest = [(n, f) for n, f in fates.items() if isinstance(f, Ignored | Refused)]
        for head, some in (("field", used), ("refused or ignored", rest)):
            if some:
                parts.append(
                    _table((head, "meaning"), [(f"`{n}`", explain(fate)) for n, fate in some])
                )
    return "\n\n".join(parts)


def models() -> str:
    """Return the supported families."""
    from checkpoints.gguf_architectures import hf_classes
    from jaxinfer.models import supported_families

    in_gguf = hf_classes()
    rows = [
        (
            family.name,
            ", ".join(f"`{name}`" for name in family.architectures),
            ", ".join(family.examples),
            "safetensors, GGUF" if in_gguf & set(family.architectures) else "safetensors",
        )
        for family in supported_families()
    ]
    return _table(("family", "`architectures` in config.json", "known models", "formats"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "config": config,
    "server": server,
    "sampling": sampling,
    "processors": processors,
    "cli": cli,
    "http": http,
    "models": models,
}


def _type_name(annotation: Any) -> str:
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"(collections\.abc|typing)\.", "", name).replace("|", "or")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
