"""What goes wrong in a compile becomes a report, and costs no other case its own."""

from __future__ import annotations

import pytest

from pallas_kernels.aot import Report, Toolchain, ToolchainError, compile_cases
from pallas_kernels.aot.driver import Job

PLANTED = "tests.kernels.compile.planted"
BEFORE = [("spills", "a100"), ("dies", "a100"), ("too much shared memory", "l4")]


@pytest.fixture(scope="module")
def reports(toolchain: Toolchain) -> dict[str, Report]:
    jobs = [Job(PLANTED, case, chip) for case, chip in (*BEFORE, ("harmless", "a100"))]
    return {report.case: report for report in compile_cases(jobs, toolchain)}


def test_spill_is_reported_with_its_kernel(reports: dict[str, Report]):
    (kernel,) = reports["spills"].named(("paged_prefill",))
    assert kernel.spill_bytes > 0
    # What the assembler calls a spill stands in the machine code, too.
    assert kernel.instructions["STL"] > 0
    assert kernel.instructions["LDL"] > 0


def test_too_much_shared_memory_is_an_error_with_the_limit(reports: dict[str, Report]):
    assert "101376" in (reports["too much shared memory"].error or "")


def test_process_that_dies_is_reported_with_its_last_words(reports: dict[str, Report]):
    assert "LLVM ERROR: planted" in (reports["dies"].crash or "")


def test_cases_behind_a_dead_process_are_compiled(reports: dict[str, Report]):
    assert reports["harmless"].ok
    assert reports["harmless"].kernels


def test_process_that_hangs_is_ended_and_reported(toolchain: Toolchain):
    (report,) = compile_cases([Job(PLANTED, "hangs", "a100")], toolchain, timeout_s=15.0)
    assert report.crash == "no answer after 15 s"


def test_compiler_of_another_jax_is_refused_with_both_versions(tmp_path):
    (tmp_path / "tools" / "nvidia" / "cu13" / "bin").mkdir(parents=True)
    (tmp_path / "tools" / "nvidia" / "cu13" / "bin" / "ptxas").touch()
    (tmp_path / "plugin" / "jax_cuda13_plugin-0.4.1.dist-info").mkdir(parents=True)
    with pytest.raises(ToolchainError, match=r"0\.4\.1.*but jax is"):
        Toolchain(tmp_path).check()


def test_missing_compiler_is_refused_with_the_way_to_get_it(tmp_path):
    with pytest.raises(ToolchainError, match="make gpu-compiler"):
        Toolchain(tmp_path).check()
