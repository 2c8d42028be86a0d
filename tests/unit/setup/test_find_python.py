"""`.ci/find-python`, run against a made-up PATH, home and pyenv."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / ".ci" / "find-python"


@pytest.fixture
def machine(tmp_path: Path):
    """Returns a machine without any Python: `put` installs one, `find` runs the script."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, root: Path):
        self.bin = root / "bin"
        self.pyenv = root / "py env"
        self.home = root / "home"
        for folder in (self.bin, self.pyenv, self.home):
            folder.mkdir()

    def put(self, path: Path, body: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def put_good(self, path: Path) -> Path:
        return self.put(path, f'exec "{sys.executable}" "$@"')

    def put_version(self, version: str) -> Path:
        return self.put_good(self.pyenv / "versions" / version / "bin" / "python3")

    def find(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "PYENV_ROOT": str(self.pyenv), "HOME": str(self.home)}
        return subprocess.run(
            ["/bin/sh", str(SCRIPT), *args],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def test_newest_on_path_wins(machine: Machine):
    machine.put_good(machine.bin / "python3")
    newest = machine.put_good(machine.bin / "python3.13")
    assert machine.find().stdout.strip() == str(newest)


def test_shim_that_exits_non_zero_is_not_a_python(machine: Machine):
    machine.put(machine.bin / "python3.13", 'echo "command not found" >&2; exit 127')
    machine.put(machine.bin / "python3.12", "exit 1")
    good = machine.put_good(machine.bin / "python3")
    assert machine.find().stdout.strip() == str(good)


def test_versions_folder_is_searched_newest_first(machine: Machine):
    machine.put(machine.bin / "python3", "exit 1")
    machine.put(machine.pyenv / "versions/3.13.9/bin/python3", "exit 1")
    machine.put_version("3.12.1")
    newest = machine.put_version("3.13.0")
    assert machine.find().stdout.strip() == str(newest)


def test_home_pyenv_is_searched_too(machine: Machine):
    good = machine.put_good(machine.home / ".pyenv/versions/3.12.4/bin/python3")
    assert machine.find().stdout.strip() == str(good)


def test_without_any_python_it_says_what_to_install(machine: Machine):
    result = machine.find()
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Python 3.12" in result.stderr
    assert "pyenv install" in result.stderr


def test_named_candidates_are_the_only_ones_tried(machine: Machine):
    machine.put_good(machine.bin / "python3.13")
    bad = machine.put(machine.bin / "other", "exit 3")
    assert machine.find(str(bad)).returncode == 1
