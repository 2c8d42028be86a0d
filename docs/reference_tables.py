"""A mkdocs hook: fills `<!-- reference: NAME -->` from the code, so that the pages cannot drift.

Tables of records come from their docstrings, the command line from its own help.
"""

from __future__ import annotations

import dataclasses
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


def sampling() -> str:
    """Return the sampling parameters."""
    from jaxinfer.sampling_params import SamplingParams

    return record_table(SamplingParams)


def cli() -> str:
    """Return the help of every command, as a terminal shows it."""
    from typer.testing import CliRunner

    from jaxinfer.cli import app

    parts = []
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    for name in names:
        shown = CliRunner().invoke(
            app, [name, "--help"], env={"COLUMNS": "100"}, prog_name="jaxinfer"
        )
        assert shown.exit_code == 0, shown.output
        parts.append(f"## {name}\n\n```text\n{shown.output.strip()}\n```")
    return "\n\n".join(parts)


def http() -> str:
    """Return the request fields: implemented, ignored on purpose, refused."""
    from jaxinfer.cli_options import attribute_docs
    from jaxinfer.sampling_params import SamplingParams
    from jaxinfer.server.fields import FIELDS, Ignored, Refused
    from jaxinfer.server.protocol import ChatCompletionRequest, CompletionRequest

    docs = attribute_docs(SamplingParams) | HTTP_FIELDS
    endpoints = {"completions": CompletionRequest, "chat completions": ChatCompletionRequest}
    names = list(dict.fromkeys(n for model in endpoints.values() for n in model.model_fields))
    rows = []
    for name in names:
        known = [label for label, model in endpoints.items() if name in model.model_fields]
        where = "both" if len(known) == len(endpoints) else ", ".join(known)
        rows.append((f"`{name}`", where, docs[name]))
    ignored = [(f"`{n}`", rule.why) for n, rule in FIELDS.items() if isinstance(rule, Ignored)]
    refused = [(f"`{n}`", rule.hint) for n, rule in FIELDS.items() if isinstance(rule, Refused)]
    return "\n\n".join(
        [
            "## Fields of a request",
            _table(("field", "where", "meaning"), rows),
            "## Ignored",
            "Accepted, because no answer depends on them. Fields that nobody knows are accepted "
            "too, and logged.",
            _table(("field", "why that is right"), ignored),
            "## Refused",
            "Not implemented: anything but a value that asks for nothing is a 400 that names the "
            "field.",
            _table(("field", "instead"), refused),
        ]
    )


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


# What `SamplingParams` does not know, or what HTTP spells differently.
HTTP_FIELDS = {
    "model": "The name under `/v1/models`; may be left out.",
    "prompt": "A text, a list of texts, a list of token ids, or a list of such lists.",
    "messages": "The conversation: `role` and `content` of each message.",
    "max_tokens": "Most tokens to produce. Default: 16, or for chat what fits.",
    "max_completion_tokens": "OpenAI's newer name of `max_tokens`; wins over it.",
    "logprobs": "Completions: alternatives per token. Chat: `true` for log-probabilities.",
    "top_logprobs": "Number of alternatives per token; needs `logprobs`.",
    "echo": "Put the prompt in front of the answer.",
    "stream": "Send the answer as server-sent events, piece by piece.",
    "stream_options": "`include_usage` adds a chunk with the usage at the end, "
    "`continuous_usage_stats` puts it into each chunk.",
    "add_special_tokens": "Put the tokenizer's BOS in front. Completions: `true`. Chat: `false`, "
    "the template does it.",
    "priority": "Lower runs first, under the priority policy.",
    "cache_salt": "Prefix pages are shared only among requests with the same salt.",
    "request_id": "A name for the request, in the answer and in the log.",
    "return_token_ids": "Add the token ids of prompt and answer.",
    "return_tokens_as_token_ids": "Log-probabilities name tokens as `token_id:123`.",
    "add_generation_prompt": "End the rendered conversation with the start of an answer.",
    "continue_final_message": "Go on with the last message, which is the assistant's.",
    "chat_template_kwargs": "Variables for the chat template.",
}

TABLES: dict[str, Callable[[], str]] = {
    "config": config,
    "sampling": sampling,
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
