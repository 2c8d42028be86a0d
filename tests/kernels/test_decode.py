"""Paged decode by the portable GPU kernel, interpreted, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tiles import DecodeTiles
from pallas_kernels.triton import backend, decode_kernels
from pallas_kernels.triton.decode import paged_decode
from tests.kernels.bounds import strict_bounds
from tests.kernels.oracle import Case, Step, attend, make_step

# Small blocks, so that short sequences have many: 384 keys are 24 blocks.
BLOCK_K = 16

SMALL = {"max_tokens": 24, "max_rows": 5, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64}

# Interpreting takes milliseconds, compiling the interpreter's program a second or two: examples of
# one setting share it.
STATIC = ("scale", "sliding_window", "logit_softcap", "max_query_len", "split_len", "tiles")
jitted = jax.jit(functools.partial(paged_decode, interpret=True), static_argnames=STATIC)


def tiles(num_splits: int = 4) -> DecodeTiles:
    return DecodeTiles(block_k=BLOCK_K, num_splits=num_splits, num_warps=4, num_stages=2)


def decode(step: Step, *, num_splits: int = 4, **keywords: Any) -> np.ndarray:
    """Run the kernel; all rows of the step must be decode rows."""
    *arrays, batch = step.arguments
    batch = batch._replace(num_decode_rows=batch.num_rows)
    step = dataclasses.replace(step, arguments=(*arrays, batch))
    return attend(jitted, step, tiles=tiles(num_splits), **keywords)


def slow(*values: Any) -> Any:
    """Mark a parameter that others stand for."""
    return pytest.param(*values, marks=pytest.mark.slow)


@st.composite
def rows_of_few_tokens(draw: st.DrawFn, most_tokens: int, **fixed: Any) -> Case:
    """Draw rows of few tokens, or none, at the edges of pages, blocks and windows."""
    shape = Case((), **SMALL, **fixed)
    most = shape.max_pages * shape.page_size
    rows, left = [], shape.max_tokens
    count = draw(st.sampled_from([0, 1, 2, 3, shape.max_rows - 1, shape.max_rows]))
    for _ in range(count):
        edges = st.sampled_from([1, 15, 16, 17, 22, 23, 24, 31, 32, 33, most - 1, most])
        keys = min(draw(edges | st.integers(1, most)), most)
        new = min(draw(st.integers(min(1, most_tokens - 1), most_tokens)), keys, left)
        rows.append((new, keys))
        left -= new
    return dataclasses.replace(
        shape,
        rows=tuple(rows),
        shared_pages=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 999)),
    )


@pytest.mark.parametrize(("page_size", "window"), [(16, None), (16, 23), (4, 1), (1, 23)], ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_one_token_rows_equal_the_oracle_and_read_no_poison(page_size, window, data) -> None:
    fixed = {"page_size": page_size, "sliding_window": window}
    step = make_step(data.draw(rows_of_few_tokens(1, **fixed)))
    step.check(decode(step))


@pytest.mark.parametrize(("page_size", "window"), [(16, None), (16, 23), (1, 1)], ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_rows_of_several_tokens_equal_the_oracle_and_read_no_poison(
    page_size, window, data
) -> None:
    fixed = {"page_size": page_size, "sliding_window": window, "sinks": True, "logit_softcap": 3.0}
    step = make_step(data.draw(rows_of_few_tokens(8, **fixed)))
    step.check(decode(step, max_query_len=8))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", "bfloat16"),
        ("float32", "int8"),
        slow("float32", "float8_e4m3fn"),
        slow("bfloat16", "bfloat16"),
        slow("bfloat16", "float32"),
        slow("bfloat16", "int8"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float16"),
        slow("float16", "int8"),
    ],
)
def test_dtypes_stay_within_the_precision_of_the_queries(dtype: str, kv_dtype: str) -> None:
    """Pages are what they are: one byte a number costs no precision behind the pages."""
    rows = ((1, 384), (1, 100), (1, 1))
    step = make_step(Case(rows, dtype=dtype, kv_dtype=kv_dtype, sliding_window=150, **SMALL))
    step.check(decode(step, num_splits=1))


@pytest.mark.parametrize("head_dim", [slow(80), 96, slow(128), slow(192), 256])
def test_head_dims(head_dim: int) -> None:
    step = make_step(Case(((1, 100), (1, 17)), **{**SMALL, "head_dim": head_dim, "max_pages": 7}))
    step.check(decode(step, num_splits=2))


@pytest.mark.parametrize(("group", "tokens"), [(1, 1), slow(3, 5), (7, 8), slow(16, 1), (16, 8)])
def test_query_heads_per_key_head(group: int, tokens: int) -> None:
    """8 tokens of 16 heads are more than one tile."""
    shape = {**SMALL, "num_heads": 2 * group}
    step = make_step(Case(((tokens, 130), (1, 5), (tokens - 1, 40)), **shape))
    step.check(decode(step, max_query_len=tokens, num_splits=1 + tokens % 2))


@pytest.mark.parametrize(
    ("window", "how"),
    [
        (None, {"num_splits": 1}),
        slow(None, {"num_splits": 2}),
        (None, {"num_splits": 8}),
        # More than are added up in one go.
        (None, {"split_len": BLOCK_K}),
        slow(None, {"split_len": 3 * BLOCK_K}),
        slow(40, {"num_splits": 2}),
        (40, {"split_len": 2 * BLOCK_K}),
    ],
    ids=str,
)
def test_any_number_of_splits_gives_the_same(window: int | None, how: dict[str, int]) -> None:
    """In one split or in many, evenly or at fixed positions."""
    rows = ((1, 384), (3, 300), (1, 20), (1, 1))
    case = Case(rows, sliding_window=window, sinks=True, logit_softcap=2.0, **SMALL)
    step = make_step(case)
    step.check(decode(step, max_query_len=3, **how))


@pytest.mark.parametrize("window", [None, 50])
def test_fixed_splits_are_bitwise_independent_of_neighbours_and_padding(window: int | None) -> None:
    """Alone or among others, in a small or a large batch, with a short or a long page table."""
    case = Case(((1, 333), (1, 384), (1, 7)), sliding_window=window, **SMALL)
    *arrays, batch = make_step(case).arguments
    q, k, v = map(jnp.asarray, arrays)

    # Longer tables have more splits.
    table = jnp.pad(batch.page_table, ((0, 0), (0, 40)), constant_values=-1)

    def first_row(num_rows: int, num_tokens: int, max_pages: int) -> np.ndarray:
        start = jnp.minimum(batch.query_start_loc, num_rows)
        some = batch._replace(
            page_table=table[:, :max_pages],
            query_start_loc=start,
            num_decode_rows=jnp.int32(num_rows),
        )
        how = {"scale": 0.2, "sliding_window": window, "split_len": 4 * BLOCK_K}
        return np.asarray(jitted(q[:num_tokens], k, v, some, tiles=tiles(), **how)[0])

    alone = first_row(1, 1, 21)
    assert alone.any()
    for sizes in ((3, 24, 64), (3, 3, 24)):
        np.testing.assert_array_equal(first_row(*sizes), alone)


def test_splits_that_a_row_does_not_reach_are_neither_computed_nor_read() -> None:
    """What work there is follows from the lengths: one block for one key, of 8 for 128."""
    step = make_step(Case(((1, 128), (1, 1)), **SMALL))
    q, k, v, batch = step.arguments
    # A page table that leads nowhere behind the first key, and NaN where it leads by mistake.
    table = np.array(batch.page_table)
    table[1, 1:] = 2**31 - 1
    step = dataclasses.replace(step, arguments=(q, k, v, batch._replace(page_table=table)))
    step.check(decode(step, split_len=BLOCK_K))


@pytest.mark.parametrize(
    ("tokens", "window", "how"),
    [(1, None, {"num_splits": 1}), (1, 23, {"split_len": 2 * BLOCK_K}), (5, None, {})],
    ids=str,
)
def test_nothing_outside_of_an_array_is_touched(
    monkeypatch: pytest.MonkeyPatch, tokens: int, window: int | None, how: dict[str, int]
) -> None:
    """Not by page ids that are garbage, nor by heads, tokens and dimensions that are padding."""
    shape = {**SMALL, "num_heads": 6, "num_kv_heads": 2, "head_dim": 80, "max_tokens": 12}
    rows = ((tokens, 384), (1, 17), (tokens, 33), (1, 1))
    step = make_step(Case(rows, sliding_window=window, sinks=True, kv_dtype="int8", **shape))
    with strict_bounds(monkeypatch, decode_kernels):
        step.check(decode(step, max_query_len=tokens, **how))


def test_rows_longer_than_the_page_table_end_with_it() -> None:
    """A wrong length must not lead behind the table: the result is that of a full table."""
    case = Case(((1, 384),), **SMALL)
    step = make_step(case)
    *arrays, batch = step.arguments
    longer = batch._replace(seq_lens=batch.seq_lens + jnp.asarray([7, 0, 0, 0, 0], jnp.int32))
    wrong = dataclasses.replace(step, arguments=(*arrays, longer))
    # A decode token stands at its row's end, wherever that is.
    np.testing.assert_array_equal(decode(wrong), decode(step))


def test_a_split_length_that_cuts_blocks_is_refused() -> None:
    step = make_step(Case(((1, 9),), **SMALL))
    with pytest.raises(ValueError, match="split_len=24"):
        decode(step, split_len=24)


def test_arrays_that_the_lowering_addresses_wrongly_are_refused() -> None:
    """Offsets are of 32 bits and count elements; they grow to 64 only beyond 2**32 bytes."""

    def check(num_pages: int, dtype: str) -> None:
        pages = jax.ShapeDtypeStruct((num_pages, 8, 64, 128), dtype)
        jax.eval_shape(lambda x: backend.check_offsets(x), pages)

    check(2**15, "int8")
    check(2**15, "bfloat16")
    check(2**16 + 1, "int8")
    with pytest.raises(NotImplementedError, match=r"int8\[32769, 8, 64, 128\].*fewer pages"):
        check(2**15 + 1, "int8")
