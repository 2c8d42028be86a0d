"""The lowering that the portable kernels stand on is still there. JAX has deprecated it."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

CI = Path(__file__).parents[3] / ".ci"
GONE = (
    "jax {version} has no Pallas Triton lowering any more ({what}): pin jax below this version in "
    "pyproject.toml, and move the GPUs that pallas_kernels/triton serves to Mosaic kernels"
)


def test_triton_lowering_is_still_in_jax():
    """The import alone; whether it compiles, the other tests here say."""
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        pytest.fail(GONE.format(version=jax.__version__, what=error))
    used = ("CompilerParams", "elementwise_inline_asm", "load", "store")
    missing = [name for name in used if not hasattr(triton, name)]
    if missing:
        pytest.fail(GONE.format(version=jax.__version__, what=f"no {', '.join(missing)}"))


def test_jax_without_the_lowering_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with pytest.raises(pytest.fail.Exception, match="pin jax below this version"):
        test_triton_lowering_is_still_in_jax()


# Stands in for every Python: that of .venv, which has a JAX, and that of the new environment.
PYTHON = """#!/bin/sh
case "$*" in
    *"index versions jax"*) {index} ;;
    *'metadata.version("jax")'*) echo 0.12.0 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pytest "*) echo "ran $*"; exit {status} ;;
esac
"""


@pytest.mark.parametrize(
    ("index", "status", "expected", "says"),
    [
        ("exit 1", 1, 0, "PyPI does not say which JAX is the newest"),
        ('echo "jax (0.12.0)"', 1, 0, "The tests run with the newest JAX, 0.12.0"),
        ('echo "jax (0.13.0)"', 1, 1, "ran -m pytest tests/kernels/compile"),
        ('echo "jax (0.13.0)"', 0, 0, "ran -m pytest tests/kernels/compile"),
    ],
    ids=["no network", "the same", "newer and broken", "newer and good"],
)
def test_the_ci_job_compiles_with_a_newer_jax_and_fails_with_it(
    tmp_path: Path, index: str, status: int, expected: int, says: str
):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(index=index, status=status))
    python.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI / "newest-jax", tmp_path / ".ci")
    find = tmp_path / ".ci" / "find-python"
    find.write_text(f"#!/bin/sh\necho '{python}'\n")
    find.chmod(0o755)
    for folder in ("pallas_kernels", "tests/kernels/compile"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "some.py").touch()

    def run() -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / ".ci" / "newest-jax")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    first = run()
    assert first.returncode == expected, first.stderr
    assert says in first.stdout
    # Once is enough for the same kernels, but not for others.
    if status == 0:
        assert "have passed" in run().stdout
        (tmp_path / "pallas_kernels" / "some.py").write_text("changed")
        assert says in run().stdout
