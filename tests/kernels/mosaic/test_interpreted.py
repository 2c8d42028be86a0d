"""Hopper kernels in the race-detecting interpreter: right against the oracle, and free of races.

The steps are small, since a block of the grid takes a tenth of a second, and each of them holds
several edges: rows of 0 and 1 tokens, of a page ± 1, windows that start within a page, slots of the
page table that lead to poison, and poisoned slots behind a row's last key.
"""

from __future__ import annotations

import re

import jax
import pytest

from tests.kernels.mosaic.interpreter import Answer, interpret
from tests.kernels.mosaic.worker import Job

SMALL = {
    "num_heads": 2,
    "num_kv_heads": 1,
    "max_tokens": 72,
    "max_rows": 4,
    "max_pages": 12,
    "head_dim": 64,
}

JOBS = {
    "prefill": Job("prefill", {**SMALL, "rows": [(1, 30), (0, 7), (17, 17), (40, 150)]}),
    "prefill, float16, one head of three in a tile": Job(
        "prefill",
        {
            **SMALL,
            "rows": [(3, 15), (16, 65)],
            "num_heads": 3,
            "dtype": "float16",
            "max_tokens": 24,
        },
    ),  # fmt: skip
    "prefill, eight heads in a tile, two of them": Job(
        "prefill",
        {**SMALL, "rows": [(1, 5), (9, 48)], "num_heads": 16, "num_kv_heads": 2, "max_tokens": 16},
    ),
    "prefill, window within a page, cap, sinks": Job(
        "prefill",
        {
            **SMALL,
            "rows": [(1, 30), (3, 17), (66, 170)],
            "sliding_window": 23,
            "logit_softcap": 5.0,
            "sinks": True,
        },
    ),
    "prefill into an array, shared pages of 64 tokens, three stages": Job(
        "prefill",
        {
            **SMALL,
            "rows": [(1, 70), (9, 129), (40, 260)],
            "page_size": 64,
            "max_pages": 6,
            "shared_pages": 1,
        },
        into_out=True,
        num_stages=3,
    ),
    "prefill of half pages, head dim 80": Job(
        "prefill",
        {
            **SMALL,
            "rows": [(19, 145)],
            "page_size": 128,
            "max_pages": 3,
            "head_dim": 80,
            "max_tokens": 21,
        },
    ),  # fmt: skip
    "prefill of head dim 256": Job(
        "prefill", {**SMALL, "rows": [(20, 90)], "head_dim": 256, "num_heads": 1, "max_tokens": 24}
    ),
    "decode": Job("decode", {**SMALL, "rows": [(1, 1), (1, 17), (1, 190), (9, 30)]}),
    "decode, window, cap, sinks, three heads": Job(
        "decode",
        {
            **SMALL,
            "rows": [(1, 15), (1, 192)],
            "num_heads": 3,
            "sliding_window": 100,
            "logit_softcap": 5.0,
            "sinks": True,
            "dtype": "float16",
        },
    ),
    "decode of one to four tokens at fixed splits": Job(
        "decode",
        {
            **SMALL,
            "rows": [(3, 130), (4, 191), (1, 5)],
            "num_heads": 6,
            "num_kv_heads": 2,
            "max_tokens": 16,
        },
        keywords={"max_query_len": 4, "split_len": 64},
        num_decode_rows=3,
    ),  # fmt: skip
    "decode of more rows than a tile has": Job(
        "decode",
        {**SMALL, "rows": [(5, 70)], "num_heads": 16},
        keywords={"max_query_len": 5},
        num_decode_rows=1,
    ),
}


# Three steps in two slots, and a last block that needs clearing.
PREFILL = Job("prefill", {**SMALL, "rows": [(40, 150)], "num_heads": 1})
DECODE = Job("decode", {**SMALL, "rows": [(1, 190)]})
FAULTS = [
    (kernel, fault)
    for kernel in ("prefill", "decode")
    for fault in ("NoWaitForFreeSlots", "NoWaitForKeys", "NoWaitForValues", "NoMeetings")
    if (kernel, fault) != ("decode", "NoMeetings")
]


# A tile that ends with its row: without meetings one warpgroup clears values that the other reads.
WHOLE_TILE = Job("prefill", {**PREFILL.case, "rows": [(128, 150)], "max_tokens": 128})


def with_fault(kernel: str, fault: str) -> Job:
    job = {"prefill": PREFILL, "decode": DECODE}[kernel]
    job = WHOLE_TILE if fault == "NoMeetings" else job
    keywords = {"split_len": 192} if kernel == "decode" else {}
    return Job(job.kernel, job.case, ring=fault, keywords=keywords)


FAULTY = {f"{kernel} {fault}": with_fault(kernel, fault) for kernel, fault in FAULTS}

SLOW = {
    "prefill, eight heads in a tile, two of them",
    "prefill of half pages, head dim 80",
    "prefill of head dim 256",
    "decode of more rows than a tile has",
}
PARAMS = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else (), id=name) for name in JOBS
]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[str, Answer]:
    """What the selected tests ask for, in one process."""
    items = (item for item in request.session.items if item.path == request.path)
    items = (item for item in items if not item.get_closest_marker("skip"))
    wanted = [item.callspec.params.get("name") for item in items if hasattr(item, "callspec")]
    jobs = {name: job for name, job in {**JOBS, **FAULTY}.items() if name in wanted}
    return dict(zip(jobs, interpret(list(jobs.values())), strict=False))


@pytest.mark.parametrize("name", PARAMS)
def test_a_kernel_gives_the_oracles_answer_without_a_race(name: str, answers) -> None:
    assert name in answers, "a job before it hung"
    assert not answers[name].hung
    assert answers[name].error is None, answers[name].error


@pytest.mark.parametrize("name", FAULTY)
def test_a_missing_wait_is_a_race(name: str, answers) -> None:
    if "NoMeetings" in name and jax.__version_info__ < (0, 12):
        pytest.skip("the detector before JAX 0.12 does not compare plain reads with plain writes")
    assert name in answers, "a job before it hung"
    assert not answers[name].hung
    error = answers[name].error
    assert error is not None
    # A wait that is missing altogether leaves a completed barrier that nobody has observed.
    assert re.search(r"RACE DETECTED|no threads observed|had only observed barrier", error), error


@pytest.mark.parametrize("kernel", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_a_missing_arrival_never_ends(kernel: str) -> None:
    """It is given three times as long as the same step without the fault takes."""
    sound, broken = with_fault(kernel, "Ring"), with_fault(kernel, "KeysAreNeverReleased")
    answers = interpret([sound, sound, broken], last_within=3)
    assert answers[:2] == [Answer(hung=False, error=None)] * 2
    assert answers[2].hung
