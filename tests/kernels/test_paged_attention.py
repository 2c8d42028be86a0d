"""Attention over pages against a float64 oracle that gathers each row's keys one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import cpu_kernels
from pallas_kernels import RaggedBatch, paged_attention
from pallas_kernels.attention import IMPLEMENTATIONS
from tests.kernels.cpu import CPU_ISAS, isa_or_skip

ALL = (*IMPLEMENTATIONS, *(f"cpu {isa}" for isa in CPU_ISAS))

MAX_TOKENS, MAX_ROWS, MAX_PAGES = 160, 8, 24


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: `rows` lists (new tokens, keys in all) of each row, one-token rows first."""

    rows: tuple[tuple[int, int], ...]
    page_size: int = 16
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    sliding_window: int | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    seed: int = 0


def attention_of(impl: str) -> Callable[..., jax.Array]:
    """Return an implementation by its name; skip where it does not exist."""
    if impl in IMPLEMENTATIONS:
        return partial(paged_attention, impl=impl)
    return partial(cpu_kernels.paged_attention, isa=isa_or_skip(impl.removeprefix("cpu ")))


def run_case(case: Case, impl: str) -> tuple[np.ndarray, np.ndarray]:
    """Return attention by `impl` and by the oracle, float64 [tokens in use, N, H].

    Everything that must not matter is poisoned: pages nobody holds, slots behind a row's last key,
    and page-table entries behind its last page and before the window of its first token lead to
    NaN.
    """
    rng = np.random.default_rng(case.seed)
    rows, ps = sorted(case.rows, key=lambda row: row[0] > 1), case.page_size
    used = [-(-keys // ps) for _, keys in rows]
    num_pages = sum(used) + 3
    K, H = case.num_kv_heads, case.head_dim
    pages = np.full((2, num_pages, K, ps, H), np.nan)
    table = rng.integers(-5, num_pages + 5, (MAX_ROWS, MAX_PAGES)).astype(np.int32)
    order = iter(rng.permutation(num_pages))
    for i, (new, keys) in enumerate(rows):
        oldest = max(0, keys - new - case.sliding_window + 1) if case.sliding_window else 0
        first = oldest // ps
        table[i, first : used[i]] = [next(order) for _ in range(first, used[i])]
        for s in range(first * ps, keys):
            pages[:, table[i, s // ps], :, s % ps] = rng.normal(size=(2, K, H))
    q = rng.normal(size=(MAX_TOKENS, case.num_heads, H))
    sinks = rng.normal(size=case.num_heads) if case.sinks else None
    q, pages = (np.asarray(jnp.asarray(x, case.dtype)) for x in (q, pages))

    starts = np.zeros(MAX_ROWS + 1, np.int32)
    seq_lens = np.zeros(MAX_ROWS, np.int32)
    starts[1 : len(rows) + 1] = np.cumsum([n for n, _ in rows])
    starts[len(rows) + 1 :] = starts[len(rows)]
    seq_lens[: len(rows)] = [keys for _, keys in rows]
    batch = RaggedBatch(
        page_table=jnp.asarray(table),
        seq_lens=jnp.asarray(seq_lens),
        query_start_loc=jnp.asarray(starts),
        num_decode_rows=jnp.int32(sum(n == 1 for n, _ in rows)),
        num_rows=jnp.int32(len(rows)),
    )
    out = attention_of(impl)(
        jnp.asarray(q),
        jnp.asarray(pages[0]),
        jnp.asarray(pages[1]),
        batch,
        scale=H**-0.5,
        sliding_window=case.sliding_window,
        logit_softcap=case.logit_softcap,
        sinks=None if sinks is None else jnp.asarray(sinks, case.dtype),
    )
    assert out.dtype == q.dtype
    total = starts[len(rows)]
    expected = np.zeros((total, case.num_heads, H))
    for i, (n, keys) in enumerate(rows):
        for j in range(n):
            token = starts[i] + j
            expected[token] = _attend(case, q[token], pages, table[i], keys - n + j, sinks)
    return np.asarray(out[:total], np.float64), expected


def _attend(case: Case, q, pages, table, position: int, sinks) -> np.ndarray:
    window = case.sliding_window or position + 1
    s = np.arange(max(0, position - window + 1), position + 1)
    kv = pages[:, table[s // case.page_size], :, s % case.page_size].astype(np.float64)
    keys, values = kv[:, 0], kv[:, 1]  # [S, K, H] each
    group = case.num_heads // case.num_kv_heads
    out = np.empty((case.num_heads, case.head_dim))
    for head in range(case.num_heads):
        scores = keys[:, head // group] @ q[head].astype(np.float64) * case.head_dim**-0.5
        if case.logit_softcap is not None:
            scores = case.logit_softcap * np.tanh(scores / case.logit_softcap)
        if sinks is not None:
            scores = np.append(scores, sinks[head])
        weights = np.exp(scores - scores.max())
        weights = (weights / weights.sum())[: len(s)]
        out[head] = weights @ values[:, head // group]
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw steps at the edges: lengths around pages and windows, full batches, equal rows."""
    page_size = draw(st.sampled_from([1, 16]))
    most_keys = MAX_PAGES * page_size
    window = draw(st.sampled_from([None, 1, 23]))
    edges = sorted({1, page_size, page_size + 1, 2 * page_size - 1, 22, 23, 24, most_keys})
    rows, left = [], MAX_TOKENS
    for _ in range(draw(st.integers(0, MAX_ROWS))):
        keys = min(draw(st.sampled_from(edges) | st.integers(1, most_keys)), most_keys)
        new = min(draw(st.sampled_from([1, 1, 2, 63, 64, 65, keys])), keys, left)
        if new:
            rows.append((new, keys))
            left -= new
    return Case(tuple(rows), page_size, sliding_window=window, seed=draw(st.integers(0, 999)))


@pytest.mark.parametrize("impl", ALL)
@settings(max_examples=12)
@given(case=cases())
def test_ragged_steps_equal_the_oracle_and_read_no_poison(impl: str, case: Case) -> None:
    out, expected = run_case(case, impl)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 64), (9, 3, 64), (16, 1, 80), (4, 4, 256)]
)
def test_head_shapes(impl: str, heads: int, kv_heads: int, head_dim: int) -> None:
    case = Case(
        ((1, 300), (1, 5), (70, 90), (3, 3)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )
    out, expected = run_case(case, impl)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("window", [None, 20])
def test_softcap(impl: str, window: int | None) -> None:
    case = Case(((1, 300), (40, 90)), logit_softcap=2.0, sliding_window=window)
    out, expected = run_case(case, impl)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_share(impl: str, window: int | None) -> None:
    case = Case(((1, 300), (1, 1), (40, 90)), sinks=True, sliding_window=window)
    out, expected = run_case(case, impl)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("impl", ALL)
def test_bfloat16_stays_within_its_precision(impl: str) -> None:
    out, expected = run_case(Case(((1, 370), (60, 200)), dtype="bfloat16"), impl)
    np.testing.assert_allclose(out, expected, atol=1e-2)


@pytest.mark.parametrize("impl", ALL)
def test_tokens_of_no_row_get_zeros(impl: str) -> None:
    batch = RaggedBatch(
        page_table=jnp.zeros((4, 2), jnp.int32),
        seq_lens=jnp.zeros(4, jnp.int32),
        query_start_loc=jnp.zeros(5, jnp.int32),
        num_decode_rows=jnp.int32(0),
        num_rows=jnp.int32(0),
    )
    pages = jnp.full((2, 1, 8, 16), jnp.nan)
    out = attention_of(impl)(jnp.ones((16, 1, 16)), pages, pages, batch, scale=1.0)
    assert not np.asarray(out).any()


@pytest.mark.parametrize("impl", ALL)
def test_a_row_is_bitwise_the_same_whatever_its_neighbours(impl: str) -> None:
    """Blocks of keys have a fixed size and order, so longer neighbours only add zeros."""
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.normal(size=(2, 64, 2, 16, 32)), jnp.float32)
    table = jnp.asarray(rng.permutation(64).reshape(2, 32), jnp.int32)
    q = jnp.asarray(rng.normal(size=(8, 4, 32)), jnp.float32)

    def first_row(*seq_lens: int) -> np.ndarray:
        n = len(seq_lens)
        batch = RaggedBatch(
            page_table=table,
            seq_lens=jnp.asarray([*seq_lens, 0][:2], jnp.int32),
            query_start_loc=jnp.asarray([0, 1, n], jnp.int32),
            num_decode_rows=jnp.int32(n),
            num_rows=jnp.int32(n),
        )
        return np.asarray(attention_of(impl)(q, pages[0], pages[1], batch, scale=0.2)[0])

    for length in (1, 77, 300):
        np.testing.assert_array_equal(first_row(length), first_row(length, 500))


def test_unknown_implementations_are_refused_by_name() -> None:
    pages = jnp.zeros((1, 1, 8, 16))
    batch = RaggedBatch(*(jnp.zeros(n, jnp.int32) for n in ((1, 1), 1, 2, (), ())))
    with pytest.raises(NotImplementedError, match="'cudnn'"):
        paged_attention(jnp.zeros((1, 1, 16)), pages, pages, batch, scale=1.0, impl="cudnn")


def test_memory_does_not_grow_with_the_context() -> None:
    """Temporaries stay the same whether the table can hold 4 thousand or 128 thousand tokens."""

    def temp_bytes(max_pages: int) -> int:
        args = (
            jax.ShapeDtypeStruct((8, 8, 64), jnp.float32),
            *[jax.ShapeDtypeStruct((8192, 2, 16, 64), jnp.float32)] * 2,
            RaggedBatch(
                *(
                    jax.ShapeDtypeStruct(shape, jnp.int32)
                    for shape in ((8, max_pages), (8,), (9,), (), ())
                )
            ),
        )
        compiled = jax.jit(lambda *a: paged_attention(*a, scale=1.0)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(8192) - temp_bytes(256) < 2 * 8 * 8192 * 4  # the table itself, padded
