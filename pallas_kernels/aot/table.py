"""Reports as a Markdown table, and the page of the documentation that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pallas_kernels.aot.case import Case
from pallas_kernels.aot.chips import CHIPS
from pallas_kernels.aot.report import KernelReport, Report

MATRIX = ("HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
"""Matrix instructions of all generations."""

COPIES = ("LDGSTS", "UTMALDG", "LDSM")
"""Asynchronous copies into shared memory, those of the copy engine, and matrix loads out of it."""

HEAD = ("program", "kernel", "chip", "target", "threads", "registers", "spills", "shared", "code")
RULER = ("---", "---", "---", "---", *("---:",) * 4, "---")

START, END = "<!-- table: start -->", "<!-- table: end -->"


def markdown(reports: Iterable[Report], cases: Mapping[str, Case]) -> str:
    """Return one row per kernel of ours; a case that failed has a row with the reason."""
    rows = [row for report in reports for row in rows_of(report, cases[report.case])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEAD, RULER, *rows))


def rows_of(report: Report, case: Case) -> list[tuple[str, ...]]:
    """Return the rows of one report, kernels by name."""
    kernels = report.named(case.kernels) if report.ok else ()
    if not kernels:
        reason = report.error or report.crash or "none of its kernels is in the program"
        target = CHIPS[report.chip].target
        return [(case.name, "", report.chip, target, *("",) * 4, _short(reason))]
    ordered = sorted(kernels, key=lambda kernel: kernel.name)
    return [(case.name, kernel.name, report.chip, *_cells(kernel)) for kernel in ordered]


def instruction_mix(kernel: KernelReport) -> str:
    """Return the telling opcodes with their counts, e.g. "HGMMA 12, UTMALDG 7 of 1424"."""
    shown = [
        f"{opcode} {kernel.instructions[opcode]}"
        for opcode in (*MATRIX, *COPIES)
        if kernel.instructions.get(opcode)
    ]
    return f"{', '.join(shown)} of {sum(kernel.instructions.values())}".lstrip()


def write_page(page: Path, table: str) -> None:
    """Put the table between the page's markers."""
    before, rest = page.read_text().split(START)
    _, after = rest.split(END)
    page.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}")


def read_page(page: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the rows of a page by program, kernel and chip; each by column."""
    _, rest = page.read_text().split(START)
    lines = rest.split(END)[0].strip().splitlines()[2:]
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {(row[0], row[1], row[2]): dict(zip(HEAD, row, strict=True)) for row in rows}


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
    text = " ".join(reason.split()).replace("|", "/")
    return text if len(text) <= 300 else f"{text[:300]}…"
