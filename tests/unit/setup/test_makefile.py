"""The Makefile's promises, read off a dry run: nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*args: str, folder: Path = ROOT) -> str:
    command = ["make", "--no-print-directory", *args]
    # `make test ARGS=…` hands its own variables down to every make below it.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    result = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Returns a folder with what set-up reads, and no environment."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def stamp_of(folder: Path) -> str:
    return re.search(r"^touch (\S+)$", make("-n", "setup", folder=folder), re.MULTILINE)[1]


def test_help_lists_every_target():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    targets, _, _ = make("help").partition("\n\n")
    listed = re.findall(r"^  make ([a-z-]+) ", targets, re.MULTILINE)
    assert sorted(phony.split()) == sorted(listed)


def test_serve_passes_on_port_model_and_flags():
    shown = make("-n", "serve", "PORT=9000", "MODEL=my models/a.gguf", "ARGS=--max-num-seqs 8")
    assert (
        "serve.py --host 127.0.0.1 --port 9000 --model 'my models/a.gguf' --max-num-seqs 8" in shown
    )


def test_serve_without_a_model_names_none():
    assert "--model" not in make("-n", "serve").partition("serve.py")[2]


def test_second_setup_does_nothing(clone: Path):
    stamp = clone / stamp_of(clone)
    stamp.parent.mkdir()
    stamp.touch()
    assert "install" not in make("-n", "setup", folder=clone)


def test_setup_is_due_again_when_the_dependencies_change(clone: Path):
    before = stamp_of(clone)
    with (clone / "pyproject.toml").open("a") as file:
        file.write("\n# one more line\n")
    assert stamp_of(clone) != before


def test_stamp_is_the_last_thing_that_setup_does(clone: Path):
    recipe = make("-n", "setup", folder=clone).splitlines()
    assert recipe[-1].startswith("touch ")
    assert "set -eu" in "".join(recipe)
