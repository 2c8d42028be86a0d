"""Hopper kernels compiled to machine code without a GPU: no spills, and TMA and wgmma are there.

The same through the entry, for one shape each, is in `tests/kernels/compile`.
"""

from __future__ import annotations

import pytest

from pallas_kernels.aot import CHIPS, Report, Toolchain, compile_cases
from pallas_kernels.aot.case import cases_of
from pallas_kernels.aot.driver import Job

MODULE = "tests.kernels.mosaic.compiled_cases"
CASES = cases_of(MODULE)
JOBS = [
    pytest.param(
        Job(MODULE, name, chip),
        marks=() if case.default else pytest.mark.slow,
        id=f"{name}-{chip}",
    )
    for name, case in CASES.items()
    for chip in case.chips
]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def reports(toolchain: Toolchain, request: pytest.FixtureRequest) -> dict[Job, Report]:
    """What the selected tests ask for, compiled in as few processes as possible."""
    here = (item for item in request.session.items if item.path == request.path)
    jobs = [item.callspec.params["job"] for item in here if not item.get_closest_marker("skip")]
    return dict(zip(jobs, compile_cases(jobs, toolchain), strict=True))


@pytest.mark.parametrize("job", JOBS)
def test_hopper_kernel_compiles_or_is_refused(job: Job, reports: dict[Job, Report]) -> None:
    report, case = reports[job], CASES[job.case]
    if "elsewhere" in job.case:
        # In our words, before the compiler meets an instruction that ends the process.
        assert report.error is not None
        assert report.error.startswith("NotImplementedError: the attention kernel for Hopper needs")
        return
    assert report.ok, report.error or report.crash
    (kernel,) = report.named(case.kernels)
    assert kernel.target == CHIPS[job.chip].target
    assert kernel.spill_bytes == 0
    assert not {"STL", "LDL"} & kernel.instructions.keys()
    assert {"HGMMA", "UTMALDG", "UTMASTG"} <= kernel.instructions.keys()
    assert kernel.shared_bytes <= CHIPS[job.chip].shared_bytes
