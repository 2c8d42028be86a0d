"""`benchmarks/gpu.py` works before a GPU is at hand: time on one is too short to debug in."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import gpu, gpu_attention, gpu_model, gpu_timing
from pallas_kernels.aot import Toolchain, compile_cases
from pallas_kernels.aot.driver import Job
from tests.kernels.compile import benchmark_cases
from tests.kernels.compile.test_kernels import MAX_GRID

ROOT = Path(__file__).parents[3]
SECTIONS = ("device copy", "matmul", "correct?", "prefill", "decode", "model")


ABSENT = (
    "gguf",
    "huggingface_hub",
    "hypothesis",
    "jaxtyping",
    "pydantic",
    "starlette",
    "tokenizers",
)
"""Packages of ours that a GPU machine with jax, flax and numpy does not have."""

RUN = """
import runpy, sys
sys.modules.update(dict.fromkeys({absent}))
sys.argv = ["benchmarks/gpu.py", *{args}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(*args: str) -> str:
    command = [sys.executable, "-c", RUN.format(absent=ABSENT, args=args)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def dry_run() -> list[list[str]]:
    # A busy machine is slow, and no row may be left out for want of time.
    lines = run_script("--dry-run", "--budget", "3000").splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_section_has_rows_in_one_table(dry_run: list[list[str]]):
    assert {len(row) for row in dry_run} == {6}
    assert list(dict.fromkeys(row[0] for row in dry_run[2:])) == list(SECTIONS)


def test_every_row_has_a_figure(dry_run: list[list[str]]):
    for what, case, time, rate, *_, notes in dry_run[2:]:
        assert rate, (what, case, notes)
        assert time or what == "correct?"


def test_results_are_right(dry_run: list[list[str]]):
    verdicts = [row[-1] for row in dry_run if row[0] == "correct?"]
    assert set(verdicts) == {"ok"}


def rows_of(out: str) -> list[list[str]]:
    lines = [line for line in out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_what_fails_costs_its_own_row(monkeypatch: pytest.MonkeyPatch, capsys):
    """A ceiling, a check, a section: all others are tried."""
    tried = []

    def fail(name: str) -> Any:
        def failing(*_: Any, **__: Any) -> None:
            tried.append(name)
            raise RuntimeError(f"{name} is planted")

        return failing

    monkeypatch.setattr(gpu_timing, "seconds", fail("a ceiling"))
    monkeypatch.setattr(gpu_attention, "largest_error", fail("a check"))
    monkeypatch.setattr(gpu_attention, "seconds", fail("a time"))
    monkeypatch.setattr(gpu, "measure_model", fail("a model"))
    gpu.run(gpu_timing.Table(), gpu_timing.Budget(100.0), gpu.TINY, "interpret", 2.0**30)
    rows = rows_of(capsys.readouterr().out)
    assert list(dict.fromkeys(row[0] for row in rows)) == list(SECTIONS)
    assert all("is planted" in row[-1] for row in rows), rows
    assert len(rows) == len(tried)


def test_step_that_fails_leaves_the_next_one_a_cache(capsys):
    """What a step donates is gone when it fails."""
    workload = gpu.TINY.workload
    model = gpu_model.Model(workload, "xla", workload.batches)
    (_, rows), *_ = workload.steps

    def break_down() -> None:
        for x in jax.tree.leaves(model.cache):
            x.delete()

    ceilings = gpu_timing.Ceilings(1.0, 1.0)
    table, budget = gpu_timing.Table(), gpu_timing.Budget(100.0)
    for name, ready in (("broken", break_down), ("sound", lambda: None)):
        gpu_model._measure_step(table, budget, ceilings, model, name, rows, ready)
    broken, sound = rows_of(capsys.readouterr().out)
    assert "deleted" in broken[-1]
    assert "tokens/s" in sound[3], sound


def test_wrong_results_are_counted(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(gpu_attention, "largest_error", lambda *_: 0.5)
    table = gpu_timing.Table()
    gpu_attention.check_all(table, gpu_timing.Budget(9.0), gpu.TINY.checks, "interpret")
    assert table.num_wrong == len(gpu.TINY.checks)
    assert {row[-1] for row in rows_of(capsys.readouterr().out)} == {"**WRONG**"}


HANG = """
import ctypes, sys, threading
from benchmarks import gpu
gpu.run = lambda *_: {hang}
sys.exit(gpu.main(["--dry-run", "--budget", "{budget}"]))
"""


@pytest.mark.parametrize(
    ("hang", "budget", "status", "says"),
    [
        ("threading.Event().wait()", -14.5, 0, "time is up"),
        # With the interpreter's lock in hand, so that no other thread runs.
        ("ctypes.PyDLL(None).pause()", -12.0, -signal.SIGALRM, ""),
    ],
    ids=["waits", "holds the lock"],
)
def test_it_ends_in_time_whatever_hangs(hang: str, budget: float, status: int, says: str):
    command = [sys.executable, "-c", HANG.format(hang=hang, budget=budget)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == status, result.stderr
    assert says in result.stdout


def test_machine_without_gpu_gets_one_clear_line():
    out = run_script()
    assert "no GPU here" in out
    assert len(out.splitlines()) == 1


def test_what_is_timed_compiles_in_its_real_shapes(toolchain: Toolchain):
    cases = benchmark_cases.cases()
    jobs = [Job(benchmark_cases.__name__, case.name, chip) for case in cases for chip in case.chips]
    for case, report in zip(cases, compile_cases(jobs, toolchain), strict=True):
        assert report.ok, report.error or report.crash
        for kernel in report.named(case.kernels):
            assert kernel.spill_bytes == 0, kernel
            assert max(kernel.grid[1:], default=0) <= MAX_GRID, kernel
