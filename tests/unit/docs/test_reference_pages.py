"""The reference pages that `docs/reference_tables.py` fills."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from jaxinfer.builtin_processors import BUILT_INS
from jaxinfer.config import EngineConfig
from jaxinfer.models import supported_families
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.protocol import ChatCompletionRequest, CompletionRequest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_tables", DOCS / "reference_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_stands_on_a_page(tables: ModuleType):
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert sorted(tables.MARKER.findall(text)) == sorted(tables.TABLES)


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("config", EngineConfig.field_names()),
        ("server", ServerOptions.__dataclass_fields__),
        ("sampling", SamplingParams.__dataclass_fields__),
        ("http", [*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields]),
    ],
)
def test_every_field_is_documented(tables: ModuleType, table: str, names):
    text = tables.TABLES[table]()
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_every_logits_processor_is_documented(tables: ModuleType):
    text = tables.TABLES["processors"]()
    assert [name for name in BUILT_INS if f"| `{name}(" not in text] == []


def test_every_family_is_documented(tables: ModuleType):
    text = tables.TABLES["models"]()
    for family in supported_families():
        assert f"| {family.name} |" in text
        assert all(example in text for example in family.examples)


def test_every_command_is_documented(tables: ModuleType):
    text = tables.TABLES["cli"]()
    commands = ("serve", "generate", "chat", "run-batch", "convert", "models", "version", "eval")
    measured = (f"bench {name}" for name in ("offline", "serve", "startup", "scheduler"))
    for command in (*commands, *measured):
        assert f"Usage: jaxinfer {command}" in text


def test_table_cells_hold_no_bare_bar(tables: ModuleType):
    for name in ("config", "server", "sampling", "http", "models"):
        for line in tables.TABLES[name]().splitlines():
            if line.startswith("|"):
                assert line.replace("\\|", "").count("|") in (3, 4, 5)
