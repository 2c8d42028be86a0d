"""Whole steps of Llama-3 shapes, compiled for H100: memory, copies, collectives."""

from __future__ import annotations

import pytest

from pallas_kernels.aot import CHIPS, Report, Toolchain, compile_cases
from pallas_kernels.aot.driver import Job
from tests.kernels.compile import whole_steps
from tests.kernels.compile.whole_steps import NUM_LAYERS, SETUPS, TOKENS, problems

STEPS = "tests.kernels.compile.whole_steps"
PLANTED = "tests.kernels.compile.planted_steps"
CHIP = "h100"
FULL_DEPTH_S = 1500.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def reports(toolchain: Toolchain) -> dict[str, Report]:
    names = [(STEPS, case.name) for case in whole_steps.cases() if case.default]
    names += [(PLANTED, name) for name in ("not donated", "cache through a scan")]
    names += [(PLANTED, "weights everywhere")]
    jobs = [Job(module, name, CHIP) for module, name in names]
    made = compile_cases(jobs, toolchain, timeout_s=300.0)
    return {report.case: report for report in made}


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_step_copies_no_cache_and_divides_weights(
    setup: whole_steps.Setup, kind: str, reports: dict[str, Report]
):
    report = reports[f"{setup.name} {kind}, {NUM_LAYERS} layers"]
    _check(report, setup, NUM_LAYERS)


@pytest.mark.slow
@pytest.mark.timeout(2 * FULL_DEPTH_S)
@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_step_of_full_depth_copies_no_cache_and_divides_weights(
    setup: whole_steps.Setup, kind: str, toolchain: Toolchain
):
    job = Job(STEPS, f"{setup.name} {kind}, full depth", CHIP)
    (report,) = compile_cases([job], toolchain, timeout_s=FULL_DEPTH_S)
    _check(report, setup, setup.hf["num_hidden_layers"])


def _check(report: Report, setup: whole_steps.Setup, layers: int) -> None:
    assert report.ok, report.error or report.crash
    full, devices = setup.hf["num_hidden_layers"], setup.devices
    assert problems(report.facts, layers=layers, full_layers=full, devices=devices) == []
    case = whole_steps.case_of(setup, "decode", layers)
    names = {kernel.name for kernel in report.kernels}
    for beginning in case.kernels:
        assert any(name.startswith(beginning) for name in names), f"{beginning} not in {names}"
    for kernel in report.named(case.kernels):
        assert kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes"
        assert kernel.shared_bytes <= CHIPS[CHIP].shared_bytes


@pytest.mark.parametrize(
    ("planted", "devices", "expected"),
    [
        ("not donated", 1, "not updated in place"),
        ("cache through a scan", 1, "have room for pages of a layer"),
        ("weights everywhere", 8, "weights are not divided"),
    ],
)
def test_planted_fault_is_seen(
    planted: str, devices: int, expected: str, reports: dict[str, Report]
):
    report = reports[planted]
    assert report.ok, report.error or report.crash
    found = problems(report.facts, layers=NUM_LAYERS, full_layers=NUM_LAYERS, devices=devices)
    assert any(expected in problem for problem in found), (found, report.facts)


def test_copies_are_read_from_hlo_with_their_bytes():
    hlo = """
  %copy.1 = bf16[2,3]{1,0} copy(%a), metadata={op_name="x"}
  %copy-start.2 = (f32[10]{0}, f32[10]{0}, u32[]) copy-start(%b)
  ROOT %copy.3 = f8e4m3fn[] copy(%c)
  %f = f32[1000]{0} fusion(%copy.1), kind=kLoop, calls=%copy_computation
"""
    assert sorted(whole_steps.copies(hlo)) == [1, 12, 40]


def test_collectives_are_counted_once_whether_asynchronous_or_not():
    hlo = " all-reduce-start(%a)\n all-reduce-done(%b)\n all-reduce(%c)\n all-gather(%d)\n"
    assert whole_steps.collectives(hlo) == {"all-reduce": 2, "all-gather": 1}
