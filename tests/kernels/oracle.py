"""What attention over pages has to return: steps with poison around the data, and float64 answers.

A `Case` says which step to make, `make_step` makes its arrays, `Step.expected` computes the answer
in numpy float64, one token and one head at a time, from what the pages really store. Everything
that must not matter to a result is poisoned:

* pages that no row holds, slots of used pages behind a row's last key, and the queries of no row
  are NaN (int8 pages cannot be: their scales are);
* page-table slots behind a row's last page, and before the window of its first token, hold ids of
  poisoned pages, negative ids and ids far outside the pool.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import RaggedBatch

QUANTIZED = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of the page dtypes that have scales."""

MAX_SHARED = 3
"""Most pages that rows share."""

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest error of an output, over the largest output, by the dtype of the queries."""

FLOAT16_OF_BYTES = 4e-3
"""The same of float16 queries and pages of one byte, whose weights are bfloat16."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to make.

    Attributes:
        rows: (new tokens, keys in all) of each row, in any order; (0, n) is a row without tokens.
        shared_pages: Rows hold the same first pages, up to so many, of their cached keys.
        kv_dtype: Of the pages; None takes `dtype`.
        max_tokens: T; max_rows: B; max_pages: P.
    """

    rows: tuple[tuple[int, int], ...]
    page_size: int = 16
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    sliding_window: int | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    kv_dtype: str | None = None
    shared_pages: int = 0
    max_tokens: int = 160
    max_rows: int = 8
    max_pages: int = 24
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """Arrays of a step, numpy ones that every implementation is given alike.

    Attributes:
        arguments: Positional arguments of an attention function.
        keywords: The others: scale, window, cap, sinks, k_scales and v_scales if there are any.
        num_tokens: Tokens that belong to a row; the outputs behind them must be zero.
    """

    case: Case
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    num_tokens: int

    @property
    def expected(self) -> np.ndarray:
        """The answer, float64 [T, N, H]."""
        q, k_pages, v_pages, batch = self.arguments
        keys = _stored(k_pages, self.keywords.get("k_scales"))
        values = _stored(v_pages, self.keywords.get("v_scales"))
        out = np.zeros(q.shape)
        starts = np.asarray(batch.query_start_loc)
        for row, length in enumerate(np.diff(starts)):
            for j in range(length):
                token = int(starts[row]) + j
                position = int(batch.seq_lens[row]) - int(length) + j
                table = np.asarray(batch.page_table[row])
                out[token] = self._attend(q[token], keys, values, table, position)
        return out

    def _attend(self, q, keys, values, table, position: int) -> np.ndarray:
        case, cap = self.case, self.keywords["logit_softcap"]
        window = case.sliding_window or position + 1
        s = np.arange(max(0, position - window + 1), position + 1)
        pages, slots = table[s // case.page_size], s % case.page_size
        group = case.num_heads // case.num_kv_heads
        out = np.empty(q.shape)
        for head in range(case.num_heads):
            k, v = (x[pages, head // group, slots] for x in (keys, values))  # [S, H] each
            scores = k @ q[head].astype(np.float64) * self.keywords["scale"]
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            if self.keywords["sinks"] is not None:
                scores = np.append(scores, self.keywords["sinks"][head].astype(np.float64))
            weights = np.exp(scores - scores.max())
            out[head] = (weights / weights.sum())[: len(s)] @ v
        return out

    @property
    def _tolerance(self) -> float:
        is_short = self.case.dtype == "float16" and self.case.kv_dtype in QUANTIZED
        return FLOAT16_OF_BYTES if is_short else TOLERANCE[self.case.dtype]

    def check(self, out: Any, tolerance: float | None = None) -> None:
        """Assert that `out` is the answer.

        The error allowed is `tolerance` (that of the dtypes if None) times the largest output of
        the step.
        """
        assert out.shape == self.arguments[0].shape
        assert out.dtype == self.arguments[0].dtype
        out, expected = np.asarray(out).astype(np.float64), self.expected
        assert np.isfinite(out).all(), "poison reached a result"
        assert not out[self.num_tokens :].any(), "tokens of no row must be zero"
        allowed = self._tolerance if tolerance is None else tolerance
        largest = np.abs(expected).max(initial=1e-30)
        np.testing.assert_allclose(out / largest, expected / largest, rtol=0, atol=allowed)


def make_step(case: Case) -> Step:
    """Make the arrays of a step; the same case gives the same arrays."""
    rng = np.random.default_rng(case.seed)
    ps, K, H = case.page_size, case.num_kv_heads, case.head_dim
    # One-token rows stand first, as everywhere.
    rows = sorted(case.rows, key=lambda row: row[0] != 1)
    table, num_held = _share_out(case, rows)
    # As many whatever the rows are, so that steps of one shape share a program.
    num_pages = case.max_rows * case.max_pages + MAX_SHARED + 3
    assert case.shared_pages <= MAX_SHARED
    filled = np.zeros((num_pages, ps), bool)
    ids = rng.permutation(num_pages)
    for i, (new, num_keys) in enumerate(rows):
        first = _oldest_key(case, new, num_keys) // ps
        used = -(-num_keys // ps) if new else 0
        garbage = [-1, -7, num_pages, num_pages + 9, 2**31 - 1, -(2**31), *ids[num_held:]]
        held = np.isin(np.arange(case.max_pages), np.arange(first, used))
        table[i] = np.where(held, ids[np.maximum(table[i], 0)], rng.choice(garbage, len(table[i])))
        s = np.arange(first * ps, num_keys if new else 0)
        filled[table[i, s // ps], s % ps] = True
    garbage_rows = rng.integers(-9, num_pages + 9, (case.max_rows - len(rows), case.max_pages))
    table[len(rows) :] = garbage_rows

    q = rng.normal(size=(case.max_tokens, case.num_heads, H))
    kv_shape = (2, num_pages, K, ps, H)
    kv = np.where(filled[:, None, :, None], rng.normal(size=kv_shape), np.nan)
    keywords: dict[str, Any] = {
        "scale": H**-0.5,
        "sliding_window": case.sliding_window,
        "logit_softcap": case.logit_softcap,
        "sinks": rng.normal(size=case.num_heads).astype(np.float32) if case.sinks else None,
    }
    kv_dtype = case.kv_dtype or case.dtype
    if kv_dtype in QUANTIZED:
        kv, scales = _quantized(kv, kv_dtype)
        keywords |= {"k_scales": scales[0], "v_scales": scales[1]}
    starts = np.zeros(case.max_rows + 1, np.int32)
    starts[1 : len(rows) + 1] = np.cumsum([new for new, _ in rows])
    starts[len(rows) + 1 :] = starts[len(rows)]
    seq_lens = np.zeros(case.max_rows, np.int32)
    seq_lens[: len(rows)] = [num_keys for _, num_keys in rows]
    num_tokens = int(starts[-1])
    assert num_tokens <= case.max_tokens
    q[num_tokens:] = np.nan
    kv, q = kv.astype(_dtype(kv_dtype)), q.astype(_dtype(case.dtype))
    batch = RaggedBatch(
        page_table=jnp.asarray(table, jnp.int32),
        seq_lens=jnp.asarray(seq_lens),
        query_start_loc=jnp.asarray(starts),
        num_decode_rows=jnp.int32(sum(new == 1 for new, _ in rows)),
        num_rows=jnp.int32(len(rows)),
    )
    return Step(case, (q, kv[0], kv[1], batch), keywords, num_tokens)


def attend(function, step: Step, **keywords: Any):
    """Call an attention function on a step's arrays."""
    q, k_pages, v_pages, batch = step.arguments
    arrays = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in
              step.keywords.items()}  # fmt: skip
    q, k_pages, v_pages = (jnp.asarray(x) for x in (q, k_pages, v_pages))
    return function(q, k_pages, v_pages, batch, **arrays, **keywords)


@st.composite
def cases(draw: st.DrawFn, decode_only: bool = False, **fixed: Any) -> Case:
    """Draw steps at the edges: lengths around pages and windows, full batches, shared prefixes.

    Args:
        draw: Hypothesis' own.
        decode_only: Only rows of one token.
        fixed: Fields that are not drawn.
    """
    shape = Case((), **fixed)
    page_size = fixed.get("page_size") or draw(st.sampled_from([1, 16]))
    window = fixed.get("sliding_window", draw(st.sampled_from([None, None, 1, 23])))
    most = shape.max_pages * page_size
    around = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size + 1, 22, 23, 24]
    edges = sorted({n for n in (*around, most - 1, most) if 0 <= n <= most})
    full = draw(st.sampled_from([None, None, shape.max_rows - 1, shape.max_rows]))
    count = draw(st.integers(0, shape.max_rows)) if full is None else full
    rows, left = [], shape.max_tokens
    for _ in range(count):
        num_keys = draw(st.sampled_from(edges) | st.integers(0, most))
        new = 1 if decode_only else draw(st.sampled_from([1, 1, 2, 15, 16, 17, 33, num_keys]))
        new = min(new, num_keys, left)
        rows.append((new, num_keys))
        left -= new
    return dataclasses.replace(
        shape,
        rows=tuple(row for row in rows if row[0] or not decode_only),
        page_size=page_size,
        sliding_window=window,
        shared_pages=draw(st.sampled_from([0, 1, MAX_SHARED])),
        seed=draw(st.integers(0, 999)),
    )


def _share_out(case: Case, rows) -> tuple[np.ndarray, int]:
    """Number the pages that rows hold, -1 where none: [B, P], and how many numbers there are."""
    table = np.full((case.max_rows, case.max_pages), -1, np.int64)
    next_page = case.shared_pages
    for i, (new, num_keys) in enumerate(rows):
        assert num_keys <= case.max_pages * case.page_size
        # Only full pages of cached keys are ever shared.
        shared = min(case.shared_pages, (num_keys - new) // case.page_size)
        own = -(-num_keys // case.page_size) - shared
        table[i, :shared] = np.arange(shared)
        table[i, shared : shared + own] = next_page + np.arange(own)
        next_page += own
    return table, next_page


def _oldest_key(case: Case, new: int, num_keys: int) -> int:
    """Return the first position that the first of the row's tokens sees."""
    if case.sliding_window is None:
        return 0
    return max(0, num_keys - new - case.sliding_window + 1)


def _quantized(kv: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return values for `dtype` and float32 scales [2, num_pages, K, page_size]; NaN where kv is.

    Int8 cannot be NaN: there the values are the largest and the scales NaN.
    """
    largest = QUANTIZED[dtype]
    scales = (np.abs(kv).max(-1) / largest).astype(np.float32)
    values = kv / scales[..., None]
    if dtype == "int8":
        values = np.where(np.isnan(values), 127, np.rint(values))
    return values, scales


def _stored(pages: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    values = pages.astype(np.float64)
    return values if scales is None else values * scales[..., None].astype(np.float64)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
