"""Attention at the ends of its numbers: scores, sinks, caps and scales that are huge, tiny or zero.

Cases share shapes, and so a program, wherever only numbers differ.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels.oracle import Case, Step, attend, make_step

# Rows of one token and longer ones, at and behind the start of their sequences, and padding.
ROWS = ((1, 100), (1, 1), (40, 90), (3, 3))
SMALL: dict[str, Any] = {
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "max_tokens": 64,
    "max_rows": 4,
    "max_pages": 8,
}
attention = {
    impl: jax.jit(
        partial(paged_attention, impl=impl),
        static_argnames=("scale", "sliding_window", "logit_softcap"),
    )
    for impl in ("xla", "interpret")
}

pytestmark = pytest.mark.parametrize("impl", attention)


def check(step: Step, impl: str, tolerance: float | None = None) -> None:
    step.check(attend(attention[impl], step), tolerance)


def with_queries(step: Step, factor: float) -> Step:
    """Make all scores so many times as large."""
    q, *others = step.arguments
    q = (q.astype(np.float32) * factor).astype(q.dtype)
    return dataclasses.replace(step, arguments=(q, *others))


def with_keywords(step: Step, **keywords: Any) -> Step:
    return dataclasses.replace(step, keywords={**step.keywords, **keywords})


@pytest.mark.parametrize("factor", [1e-30, 1e4, 1e8])
def test_scores_of_any_size(impl: str, factor: float) -> None:
    """With large ones a token attends to one key alone; a wrong maximum overflows."""
    # float32 has no digits to tell 1e8 from 1e8 + 1: some errors are the oracle's numbers' own.
    check(with_queries(make_step(Case(ROWS, sinks=True, **SMALL)), factor), impl, 1e-3)


@pytest.mark.parametrize(
    "sinks",
    [(-np.inf, -3e38), (-1e30, 1e30), (1e4, -1e4)],
    ids=str,
)
def test_sinks_of_any_size(impl: str, sinks: tuple[float, float]) -> None:
    """From none at all, also for tokens of no row, to one that leaves nothing to the keys."""
    step = make_step(Case(ROWS, sinks=True, **SMALL))
    check(with_keywords(step, sinks=np.asarray(sinks, np.float32)), impl)


@pytest.mark.parametrize("factor", [1e-3, 1e8])
def test_caps_hold_and_windows_hide_whatever_the_score(impl: str, factor: float) -> None:
    """Of a tile's first keys some tokens see none at all."""
    case = Case(ROWS, logit_softcap=30.0, sliding_window=5, **SMALL)
    check(with_queries(make_step(case), factor), impl)


def test_large_scores_of_short_floats_keep_their_precision(impl: str) -> None:
    """Of 30 times as large ones an error of 2**-9 would change a weight by a tenth."""
    case = Case(ROWS, dtype="bfloat16", **{**SMALL, "head_dim": 192})
    check(with_queries(make_step(case), 30.0), impl)


@pytest.mark.parametrize("factor", [0.0, 1e-5, 1e3])
def test_page_scales_of_any_size(impl: str, factor: float) -> None:
    """float16 ends at 6e-8, and a weight times a scale is soon below that."""
    step = make_step(Case(ROWS, dtype="float16", kv_dtype="int8", **SMALL))
    scales = {name: step.keywords[name] * np.float32(factor) for name in ("k_scales", "v_scales")}
    check(with_keywords(step, **scales), impl)


@pytest.mark.parametrize(
    "page_size", [pytest.param(8, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow),
                  pytest.param(64, marks=pytest.mark.slow), 128]
)  # fmt: skip
def test_pages_of_any_size_and_windows_within_one(impl: str, page_size: int) -> None:
    shape = {**SMALL, "max_pages": 160 // page_size + 1, "page_size": page_size}
    rows = ((1, page_size), (1, page_size + 1), (40, 130), (3, 3))
    check(make_step(Case(rows, sliding_window=3, **shape)), impl)
