"""What can be said of the cluster's part where Ray is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cluster.prefix import PIECE_CHARS, prefix_hashes


def test_ray_batch_without_ray_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(app, ["ray-batch", "-i", "a.jsonl", "-o", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install 'jaxinfer[ray]'" in result.output
    assert not (tmp_path / "out").exists()


def conversation(*contents: str, **fields) -> dict:
    roles = ("system", "user", "assistant")
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return {"model": "m", "messages": messages, **fields}


def common(a: dict, b: dict) -> int:
    """How many leading pieces two requests share."""
    pairs = zip(prefix_hashes(a), prefix_hashes(b), strict=False)
    return sum(x == y for x, y in pairs)


def test_conversations_share_what_they_begin_with() -> None:
    system = "You are kind. " * 20
    first = conversation(system, "What is the time?" * 10)
    assert common(first, conversation(system, "Where am I?" * 10)) >= len(system) // PIECE_CHARS
    longer = conversation(system, "What is the time?" * 10, "Late." * 50)
    # All but the piece that holds the end of the list.
    assert common(first, longer) >= len(prefix_hashes(first)) - 1
    assert common(first, conversation("Be brief. " * 20, "What is the time?" * 10)) == 0


def test_other_models_salts_and_tools_share_nothing() -> None:
    text = "tell me a story " * 20
    plain = conversation(text)
    assert common(plain, {**plain, "model": "other"}) == 0
    assert common(plain, {**plain, "cache_salt": "mine"}) == 0
    assert common(plain, {**plain, "tools": [{"name": "clock"}]}) == 0
    # How it is sampled is no matter.
    assert common(plain, {**plain, "temperature": 0.3}) == len(prefix_hashes(plain)) > 3


@pytest.mark.parametrize("prompt", [None, "", 5, [1, 2], {"a": "\ud800" * 200}, "\ud800" * 200])
def test_any_body_has_hashes(prompt) -> None:
    assert isinstance(prefix_hashes({"prompt": prompt}), list)
