"""What importing jaxinfer costs, and what it needs. Each case is a fresh interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import pytest

HTTP_STACK = {"starlette", "uvicorn", "pydantic", "prometheus_client", "openai"}

PRELUDE = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by the test)", name=name)

BLOCKED = frozenset(%r)
sys.meta_path.insert(0, Blocker())
"""


def python(code: str, blocked: set[str] = frozenset()) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE % sorted(blocked) + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def with_requirements(*names: str) -> set[str]:
    """Returns the distributions that installing `names` brings, in normalised spelling."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = normalised(queue.pop())
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:  # another platform's
            continue
        found.add(name)
        queue += [re.match(r"[\w.-]+", r)[0] for r in requirements if "extra ==" not in r]
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def all_but(*names: str) -> set[str]:
    """Returns the top-level modules of everything installed that `names` do not bring."""
    kept = with_requirements(*names) | {"jaxinfer"}
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if not kept & {normalised(owner) for owner in owners} and not module.startswith("_")
    }


@pytest.mark.parametrize(
    "module", ["jaxinfer", "jaxinfer.engine", "jaxinfer.models", "jaxinfer.nn", "pallas_kernels"]
)
def test_runs_where_only_jax_flax_and_numpy_are_installed(module: str):
    blocked = all_but("jax", "flax", "numpy")
    assert {"tokenizers", "starlette", "pydantic", "jaxtyping", "typer"} <= blocked
    python(f"import {module}", blocked)


def test_public_names_do_not_import_the_http_stack():
    code = "import jaxinfer; jaxinfer.LLM, jaxinfer.AsyncEngine, jaxinfer.SamplingParams\n"
    loaded = python(code + "print(*{m.partition('.')[0] for m in sys.modules})").split()
    # flax brings orbax, which brings prometheus_client.
    assert not (HTTP_STACK - {"prometheus_client"}) & set(loaded)


def test_command_line_help_does_not_import_jax():
    loaded = python("import jaxinfer.cli\nprint(*sys.modules)").split()
    assert not {"jax", "numpy", "flax", "starlette", "tokenizers"} & set(loaded)
