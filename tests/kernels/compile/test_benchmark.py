"""`benchmarks/gpu.py` works before a GPU is at hand: time on one is too short to debug in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    lines = run_script("--dry-run").splitlines()
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
