"""Every kernel, compiled for one chip of each GPU generation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pallas_kernels.aot import CHIPS, Report, Toolchain, compile_cases, matrix, table
from pallas_kernels.aot.case import cases_of
from pallas_kernels.aot.driver import Job
from pallas_kernels.capability import FLOAT_DTYPES, SCALED_DTYPES

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "gpu-kernels.md"
MATRIX = "pallas_kernels.aot.matrix"
CASES = cases_of(MATRIX)
REFUSED = {
    ("float8", "a100"): r"cannot read float8_e4m3fn pages on 'NVIDIA A100.*int8 pages would do",
    ("mosaic", "a100"): r"needs compute capability 9\.0 .*the device has 8\.0",
    ("mosaic", "b200"): r"needs compute capability 9\.0 .*the device has 10\.0",
}
"""What a chip cannot do, and how it is said."""

MAX_GRID = 65_535
"""Thread blocks along the second and third axis of a launch."""

JOBS = [
    pytest.param(
        name, chip, marks=() if case.is_sampled(chip) else pytest.mark.slow, id=f"{name}-{chip}"
    )
    for name, case in CASES.items()
    for chip in case.chips
]

# The first test waits for all programs of its batch.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def reports(toolchain: Toolchain, request: pytest.FixtureRequest) -> dict[tuple[str, str], Report]:
    """What the selected tests ask for, compiled in as few processes as possible."""
    here = (item for item in request.session.items if item.path == request.path)
    wanted = [
        Job(MATRIX, item.callspec.params["name"], item.callspec.params["chip"])
        for item in here
        if hasattr(item, "callspec") and not item.get_closest_marker("skip")
    ]
    jobs = list(dict.fromkeys(wanted))
    made = compile_cases(jobs, toolchain)
    return {(report.case, report.chip): report for report in made}


@pytest.mark.parametrize(("name", "chip"), JOBS)
def test_kernel_compiles_for_the_chip(name: str, chip: str, reports: dict[tuple[str, str], Report]):
    report, case = reports[name, chip], CASES[name]
    refusal = next(
        (why for (word, on), why in REFUSED.items() if word in name and on == chip), None
    )
    if refusal:
        # In our words and before the compiler sees it: from there an abort would come back.
        assert re.search(f"^NotImplementedError: .*{refusal}", report.error or ""), report
        return
    assert report.ok, report.error or report.crash
    kernels = report.named(case.kernels)
    for beginning in case.kernels:
        assert any(kernel.name.startswith(beginning) for kernel in kernels), beginning
    for kernel in kernels:
        assert kernel.target == CHIPS[chip].target
        assert kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes"
        assert not {"STL", "LDL"} & kernel.instructions.keys(), f"{kernel.name} uses local memory"
        assert kernel.shared_bytes <= CHIPS[chip].shared_bytes
        assert max(kernel.grid[1:], default=0) <= MAX_GRID, kernel.grid
    for beginning, opcodes in case.matrix.items():
        for kernel in report.named((beginning,)):
            assert opcodes[chip] in kernel.instructions, table.instruction_mix(kernel)


def test_default_run_compiles_everything_for_some_chip_and_every_kernel_for_each():
    sampled = {chip: [c for c in CASES.values() if c.is_sampled(chip)] for chip in CHIPS}
    for chip, cases in sampled.items():
        kernels = {kernel for case in cases for kernel in case.kernels}
        assert {matrix.PREFILL, matrix.DECODE, matrix.COMBINE, matrix.WRITE} <= kernels, chip
    covered = {case.name for cases in sampled.values() for case in cases}
    left_out = {name for name, case in CASES.items() if case.default} - covered
    # Of Hopper's some head dims are left to `-m slow`.
    assert all(name.startswith("mosaic") for name in left_out), left_out
    for word in (*FLOAT_DTYPES, *SCALED_DTYPES, "mosaic", "deterministic", "8 tokens"):
        assert any(word in name for name in covered), word


def test_table_of_the_docs_has_every_default_case_on_every_chip():
    rows = {(program, chip) for program, _, chip in table.read_page(PAGE)}
    default = [case for case in CASES.values() if case.default]
    expected = {(case.name, chip) for case in default for chip in case.chips}
    assert rows == expected, "run `make gpu-table`"


def test_table_of_the_docs_is_current(reports: dict[tuple[str, str], Report]):
    """Registers may differ a little between versions of XLA; what is used may not."""
    known = table.read_page(PAGE)
    compiled = {
        row[:3]: dict(zip(table.HEAD, row, strict=True))
        for (name, _), report in reports.items()
        if CASES[name].default
        for row in table.rows_of(report, CASES[name])
    }
    for key, row in compiled.items():
        assert key in known, f"{key}: run `make gpu-table`"
        assert _gist(known[key]) == _gist(row), f"{key}: run `make gpu-table`"
        if row["registers"]:
            assert abs(int(known[key]["registers"]) - int(row["registers"])) <= 16, key


def _gist(row: dict[str, str]) -> dict[str, object]:
    """What must not differ: everything but registers and how often an instruction occurs."""
    kept = {column: row[column] for column in ("target", "threads", "spills", "shared")}
    return {**kept, "code": re.findall(r"[A-Z]{4,}", row["code"])}
