"""Runs workers: several cases per process, and a fresh process after one that died."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from pallas_kernels.aot.report import Report
from pallas_kernels.aot.toolchain import Toolchain

TIMEOUT_S = 120.0
"""For one case, the start of its process included."""


@dataclass(frozen=True)
class Job:
    """One case for one chip.

    Attributes:
        module: Where `cases()` makes the case.
        case: Its name.
        chip: Name in `CHIPS`.
    """

    module: str
    case: str
    chip: str


def compile_cases(
    jobs: Sequence[Job],
    toolchain: Toolchain,
    *,
    timeout_s: float = TIMEOUT_S,
    processes: int = 1,
) -> list[Report]:
    """Compile every job and return the reports in the jobs' order.

    Args:
        jobs: What to compile.
        toolchain: With what.
        timeout_s: After which a case counts as crashed.
        processes: How many compile side by side.

    Raises:
        ToolchainError: There is no compiler.
    """
    toolchain.check()
    # Dealt out like cards: neighbours are of one kind and take about the same time.
    hands = [list(jobs[i::processes]) for i in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        played = pool.map(lambda hand: list(_compile(hand, toolchain, timeout_s)), hands)
        reports = dict(zip([job for hand in hands for job in hand], sum(played, []), strict=True))
    return [reports[job] for job in jobs]


def _compile(jobs: list[Job], toolchain: Toolchain, timeout_s: float) -> Iterator[Report]:
    while jobs:
        done = list(_one_process(jobs, toolchain, timeout_s))
        yield from done
        jobs = jobs[len(done) :]


def _one_process(jobs: list[Job], toolchain: Toolchain, timeout_s: float) -> Iterator[Report]:
    """Yield reports until the jobs or the process come to an end; the last job has one, too."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as name:
        scratch = Path(name)
        complaints = scratch / "stderr"
        with complaints.open("w") as stderr:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pallas_kernels.aot.worker"),
                    *(str(toolchain.folder), str(scratch)),
                ],
                env=toolchain.environment(scratch),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps([asdict(job) for job in jobs]).encode())
            process.stdin.close()
            answered = 0
            for line in _lines(process, timeout_s):
                answer = json.loads(line)
                if "report" in answer:
                    answered += 1
                    yield Report.from_json(answer["report"])
            if answered < len(jobs):
                job = jobs[answered]
                yield Report(
                    case=job.case, chip=job.chip, crash=_last_words(process, complaints, timeout_s)
                )
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _lines(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[bytes]:
    """Yield the process's lines until it ends or reports nothing for too long."""
    assert process.stdout is not None
    stream, text = process.stdout, b""
    deadline = time.monotonic() + timeout_s
    while True:
        ready, _, _ = select.select([stream], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return
        piece = stream.read1(1 << 16)  # type: ignore[attr-defined]
        if not piece:
            process.wait(timeout_s)
            return
        *lines, text = (text + piece).split(b"\n")
        if any(b'"report"' in line for line in lines):
            deadline = time.monotonic() + timeout_s
        yield from lines


def _last_words(process: subprocess.Popen[bytes], complaints: Path, timeout_s: float) -> str:
    if process.poll() is None:
        return f"no answer after {timeout_s:g} s"
    lines = [line for line in complaints.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "ERROR" in line or "Error" in line] or lines
    return f"process ended with {process.returncode}: {' | '.join(telling[-3:])}"
