"""Starts a worker and collects its answers, for as long as it gives any."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.kernels.mosaic.worker import Job

MOST_SECONDS = 120.0
"""For one job; a quiet machine takes 2."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a job.

    Attributes:
        hung: It gave no answer in time.
        error: Why it failed; None if it did not.
    """

    hung: bool
    error: str | None


def interpret(jobs: Sequence[Job], last_within: float | None = None) -> list[Answer]:
    """Run jobs one after the other; those behind one that hung are not run.

    Args:
        jobs: What to run.
        last_within: The last job may take so many times as long as the one before it took.
    """
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.mosaic.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            # XLA runs each warpgroup in a thread of its pool, which has as many as there are cores;
            # with two cores, three warpgroups and their caller would wait for each other.
            env={**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "8"},
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([dataclasses.asdict(job) for job in jobs]).encode())
            process.stdin.close()
            answers: list[Answer] = []
            took = MOST_SECONDS
            for _ in jobs:
                is_last = last_within is not None and len(answers) == len(jobs) - 1
                limit = took * last_within if is_last and last_within else MOST_SECONDS
                start = time.monotonic()
                ready, _, _ = select.select([process.stdout], [], [], limit)
                if not ready:
                    return [*answers, Answer(hung=True, error=None)]
                line = process.stdout.readline()
                if not line:
                    stderr.seek(0)
                    last_words = stderr.read().decode(errors="replace")[-2000:]
                    raise AssertionError(f"the worker died: {last_words}")
                took = time.monotonic() - start
                answers.append(Answer(hung=False, error=json.loads(line)["error"]))
            return answers
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
