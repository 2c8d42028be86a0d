"""Reports as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pallas_kernels.aot.case import Case
from pallas_kernels.aot.chips import CHIPS
from pallas_kernels.aot.report import KernelReport, Report

MATRIX = ("HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
"""Matrix instructions of all generations."""

COPIES = ("LDGSTS", "UTMALDG", "LDSM")
"""Copies into shared memory: asynchronous, by the copy engine; and matrix loads out of it."""

HEAD = ("kernel", "chip", "target", "threads", "registers", "spills", "shared", "instructions")


def markdown(reports: Iterable[Report], cases: Mapping[str, Case]) -> str:
    """Return one row per kernel of ours; a case that failed has a row with the reason."""
    lines = [HEAD, ("---", "---", "---", *("---:",) * 4, "---")]
    for report in reports:
        title = report.case
        kernels = report.named(cases[report.case].kernels) if report.ok else ()
        if not kernels:
            reason = report.error or report.crash or "none of its kernels in the program"
            cells = (title, report.chip, CHIPS[report.chip].target, *("",) * 4, _short(reason))
            lines.append(cells)
        for kernel in kernels:
            label = title if len(kernels) == 1 else f"{title}: {kernel.name}"
            lines.append((label, report.chip, *_cells(kernel)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def instruction_mix(kernel: KernelReport) -> str:
    """Return the telling opcodes with their counts, e.g. "HGMMA 12, UTMALDG 7"."""
    shown = [
        f"{opcode} {kernel.instructions[opcode]}"
        for opcode in (*MATRIX, *COPIES)
        if kernel.instructions.get(opcode)
    ]
    return ", ".join([*shown, f"of {sum(kernel.instructions.values())}"])


def _cells(kernel: KernelReport) -> tuple[str, ...]:
    return (
        kernel.target,
        str(kernel.threads or ""),
        str(kernel.registers),
        str(kernel.spill_bytes),
        str(kernel.shared_bytes),
        instruction_mix(kernel),
    )


def _short(reason: str) -> str:
    text = " ".join(reason.split()).replace("|", "\\|")
    return text if len(text) <= 200 else f"{text[:200]}…"
