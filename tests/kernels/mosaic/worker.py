"""Runs Hopper kernels in the race-detecting interpreter, in a process of its own.

Kernels with a fault may hang, and the interpreter itself does where XLA has fewer threads than a
kernel has warpgroups, which an environment variable must change before the process starts.

Reads a JSON list of jobs, writes a JSON line for each as soon as it is done.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from tests.kernels.mosaic.faults import RINGS
from tests.kernels.oracle import Case, Step, attend, make_step


@dataclasses.dataclass(frozen=True)
class Job:
    """A kernel to run on a step.

    Attributes:
        kernel: "prefill" or "decode".
        case: Fields of the oracle's `Case`.
        ring: Name in `faults.RINGS`.
        block_k: Keys per step.
        num_stages: Slots of the ring.
        keywords: Arguments for the kernel.
        into_out: Prefill into an array that is not zero.
        num_decode_rows: If not those of one token.
    """

    kernel: str
    case: dict[str, Any]
    ring: str = "Ring"
    block_k: int = 64
    num_stages: int = 2
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    into_out: bool = False
    num_decode_rows: int | None = None


def run(job: Job) -> None:
    """Run a kernel and check what it returns.

    Raises:
        Exception: It is wrong, or the interpreter saw a race.
    """
    rows = tuple(tuple(row) for row in job.case["rows"])
    step = make_step(Case(**{"dtype": "bfloat16", **job.case, "rows": rows}))
    q, k_pages, v_pages, batch = step.arguments
    if job.num_decode_rows is not None:
        batch = batch._replace(num_decode_rows=jnp.int32(job.num_decode_rows))
        step = dataclasses.replace(step, arguments=(q, k_pages, v_pages, batch))
    decoded = int(batch.query_start_loc[batch.num_decode_rows])
    sizes = {"head_dim": q.shape[2], "block_k": job.block_k, "num_stages": job.num_stages}
    how = {
        "interpret": plgpu.InterpretGPUParams(detect_races=True),
        "ring_type": RINGS[job.ring],
        **job.keywords,
    }
    expected = step.expected
    if job.kernel == "decode":
        tiles = mosaic.MosaicDecodeTiles(**sizes, num_programs=4, min_split_len=64)
        out = attend(mosaic.paged_decode, step, tiles=tiles, **how)
        expected[decoded:] = 0
    else:
        tiles = mosaic.MosaicPrefillTiles(**sizes)
        before = np.zeros(q.shape) + job.into_out * np.arange(q.shape[0])[:, None, None] / 64
        target = jnp.asarray(before, q.dtype) if job.into_out else None

        def prefill(q, k_pages, v_pages, batch, **keywords):
            return mosaic.paged_prefill(q, k_pages, v_pages, batch, target, **keywords)

        out = attend(prefill, step, tiles=tiles, **how)
        expected[:decoded] = before[:decoded]
        expected[step.num_tokens :] = before[step.num_tokens :]
    _check(step, out, expected)


def _check(step: Step, out: jax.Array, expected: np.ndarray) -> None:
    assert out.dtype == step.arguments[0].dtype
    found = np.asarray(out, np.float64)
    assert np.isfinite(found).all(), "poison reached a result"
    # Weights are rounded to 8 (bfloat16) or 11 bits before they multiply values.
    tolerance = 6e-3 if step.case.dtype == "bfloat16" else 1e-3
    largest = max(np.abs(expected).max(), 1e-30)
    np.testing.assert_allclose(found / largest, expected / largest, rtol=0, atol=tolerance)
    untouched = expected == 0
    assert not found[untouched].any(), "tokens of other rows must be zero"


def main() -> None:
    # Some interpreters print what they find; only answers go where answers are read.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # What the project's tests run under.
    warnings.simplefilter("error")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for fields in json.load(sys.stdin):
        try:
            run(Job(**fields))
            answer = {"error": None}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer["error"] is not None:
            # What the interpreter keeps of a kernel that it broke off; there is no public way.
            from jax._src.pallas.mosaic_gpu.interpret import (  # noqa: TID251
                interpret_pallas_call,
            )

            interpret_pallas_call.reset_gpu_interpret_mode_state()


if __name__ == "__main__":
    main()
