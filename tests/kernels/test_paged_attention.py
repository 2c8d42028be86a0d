"""Attention over pages, by every implementation that runs here, against the float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxinfer import cpu_kernels
from pallas_kernels import RaggedBatch, paged_attention
from tests.kernels.cpu import CPU_ISAS, isa_or_skip
from tests.kernels.oracle import Case, attend, cases, make_step

IMPLEMENTATIONS = ("xla", "interpret")
"""Plain jnp, and the GPU kernels under an interpreter."""

ALL = (*IMPLEMENTATIONS, *(f"cpu {isa}" for isa in CPU_ISAS))
"""And the CPU kernels on each instruction set."""


def attention_of(impl: str) -> Callable[..., jax.Array]:
    """Return an implementation by its name; skip where it does not exist."""
    if impl in IMPLEMENTATIONS:
        return partial(paged_attention, impl=impl)
    return partial(cpu_kernels.paged_attention, isa=isa_or_skip(impl.removeprefix("cpu ")))


def check(case: Case, impl: str, tolerance: float | None = None) -> None:
    step = make_step(case)
    step.check(attend(attention_of(impl), step), tolerance)


@pytest.mark.parametrize("impl", ALL)
@settings(max_examples=12)
@given(case=cases(head_dim=16))
def test_ragged_steps_equal_the_oracle_and_read_no_poison(impl: str, case: Case) -> None:
    check(case, impl)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        pytest.param(1, 1, 64, marks=pytest.mark.slow),
        (9, 3, 64),
        (16, 1, 80),
        pytest.param(4, 4, 256, marks=pytest.mark.slow),
    ],
)
def test_head_shapes(impl: str, heads: int, kv_heads: int, head_dim: int) -> None:
    rows = ((1, 300), (1, 5), (70, 90), (3, 3))
    check(Case(rows, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim), impl)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("window", [None, 20])
def test_softcap(impl: str, window: int | None) -> None:
    case = Case(((1, 300), (40, 90)), logit_softcap=2.0, sliding_window=window)
    check(case, impl)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_share(impl: str, window: int | None) -> None:
    check(Case(((1, 300), (1, 1), (40, 90)), sinks=True, sliding_window=window), impl)


@pytest.mark.parametrize(
    ("impl", "dtype"),
    # The engine has no float16 on a CPU.
    [*((impl, "bfloat16") for impl in ALL), *((impl, "float16") for impl in IMPLEMENTATIONS)],
)
def test_short_floats_stay_within_their_precision(impl: str, dtype: str) -> None:
    check(Case(((1, 370), (60, 200)), dtype=dtype), impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_several_tokens_may_be_decode_rows(impl: str, deterministic: bool) -> None:
    """As many as a verification of drafts has, beside a chunk of a prompt."""
    step = make_step(Case(((1, 70), (3, 200), (8, 300), (5, 5), (40, 90)), sinks=True))
    *arrays, batch = step.arguments
    batch = batch._replace(num_decode_rows=batch.num_rows - 1)
    step = dataclasses.replace(step, arguments=(*arrays, batch))
    how = {"max_query_len": 8, "deterministic": deterministic, "impl": impl}
    step.check(attend(paged_attention, step, **how))


def test_decode_rows_of_no_token_are_refused() -> None:
    step = make_step(Case(((1, 3),)))
    with pytest.raises(ValueError, match="max_query_len=0 must be at least 1"):
        attend(paged_attention, step, max_query_len=0)


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
