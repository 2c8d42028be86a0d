"""Paged decode by the portable GPU kernel, interpreted, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tiles import DecodeTiles
from pallas_kernels.triton import backend
from pallas_kernels.triton.decode import paged_decode
from tests.kernels.oracle import Case, Step, attend, cases, make_step

# Small blocks, so that short sequences have many: 384 keys are 24 blocks.
BLOCK_K = 16

SMALL = {"max_tokens": 24, "max_rows": 5, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64}


def decode(step: Step, *, num_splits: int = 4, **keywords: Any) -> np.ndarray:
    """Run the kernel; all rows of the step must be decode rows."""
    *arrays, batch = step.arguments
    batch = batch._replace(num_decode_rows=batch.num_rows)
    step = dataclasses.replace(step, arguments=(*arrays, batch))
    tiles = DecodeTiles(block_k=BLOCK_K, num_splits=num_splits, num_warps=4, num_stages=2)
    return attend(functools.partial(paged_decode, tiles=tiles, interpret=True, **keywords), step)


@st.composite
def rows_of_few_tokens(draw: st.DrawFn, **fixed: Any) -> Case:
    """Draw rows of 0 to 8 tokens at the edges of pages, blocks and windows."""
    shape = Case((), **SMALL, **fixed)
    page_size = draw(st.sampled_from([1, 16]))
    most = shape.max_pages * page_size
    rows, left = [], shape.max_tokens
    for _ in range(draw(st.integers(0, shape.max_rows))):
        keys = draw(st.sampled_from([1, 15, 16, 17, 22, 23, 24, 33, most - 1, most]))
        keys = min(keys, most)
        new = min(draw(st.integers(0, 8)), keys, left)
        rows.append((new, keys))
        left -= new
    return dataclasses.replace(
        shape,
        rows=tuple(rows),
        page_size=page_size,
        sliding_window=draw(st.sampled_from([None, 1, 23])),
        shared_pages=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 999)),
    )


@settings(max_examples=12)
@given(case=cases(decode_only=True, **SMALL))
def test_one_token_rows_equal_the_oracle_and_read_no_poison(case: Case) -> None:
    step = make_step(case)
    step.check(decode(step))


@settings(max_examples=10)
@given(case=rows_of_few_tokens(sinks=True, logit_softcap=3.0))
def test_rows_of_several_tokens_equal_the_oracle_and_read_no_poison(case: Case) -> None:
    step = make_step(case)
    step.check(decode(step, max_query_len=8))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_stay_within_the_precision_of_the_queries(dtype: str, kv_dtype: str) -> None:
    """Pages are what they are: one byte a number costs no precision behind the pages."""
    rows = ((1, 384), (1, 100), (1, 1))
    step = make_step(Case(rows, dtype=dtype, kv_dtype=kv_dtype, sliding_window=150, **SMALL))
    step.check(decode(step))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim: int) -> None:
    shape = {**SMALL, "head_dim": head_dim}
    step = make_step(Case(((1, 200), (1, 17)), **shape))
    step.check(decode(step, num_splits=2))


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_query_heads_per_key_head(group: int, tokens: int) -> None:
    """8 tokens of 16 heads are more than one tile."""
    shape = {**SMALL, "num_heads": 2 * group}
    step = make_step(Case(((tokens, 130), (1, 5), (tokens - 1, 40)), **shape))
    step.check(decode(step, max_query_len=tokens))


@pytest.mark.parametrize("window", [None, 40])
def test_any_number_of_splits_gives_the_same(window: int | None) -> None:
    """In one split, in many (also more than are added up in one go), and at fixed positions."""
    rows = ((1, 384), (3, 300), (1, 20), (1, 1))
    case = Case(rows, sliding_window=window, sinks=True, logit_softcap=2.0, **SMALL)
    step = make_step(case)
    ways = [{"num_splits": 2**n} for n in range(4)]
    ways += [{"split_len": n * BLOCK_K} for n in (1, 2, 3, 24)]
    for how in ways:
        step.check(decode(step, max_query_len=3, **how))


@pytest.mark.parametrize("window", [None, 50])
def test_fixed_splits_are_bitwise_independent_of_neighbours_and_padding(window: int | None) -> None:
    """Alone or among others, in a small or a large batch, with a short or a long page table."""
    q, k, v, batch = make_step(
        Case(((1, 333), (1, 384), (1, 7)), sliding_window=window, **SMALL)
    ).arguments
    tiles = DecodeTiles(block_k=BLOCK_K, num_splits=4, num_warps=4, num_stages=2)

    def first_row(num_rows: int, num_tokens: int, max_pages: int) -> np.ndarray:
        start = jnp.minimum(batch.query_start_loc, num_rows)
        some = batch._replace(
            page_table=batch.page_table[:, :max_pages],
            query_start_loc=start,
            num_decode_rows=jnp.int32(num_rows),
        )
        how = {"scale": 0.2, "sliding_window": window, "tiles": tiles, "split_len": 4 * BLOCK_K}
        queries = jnp.asarray(q[:num_tokens])
        return np.asarray(paged_decode(queries, k, v, some, interpret=True, **how)[0])

    alone = first_row(1, 1, 21)
    assert alone.any()
    for sizes in ((3, 24, 24), (3, 3, 24), (2, 5, 22)):
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
    class Pages:
        shape, dtype, size = (2**15, 8, 64, 128), jnp.dtype("int8"), 2**31

    with pytest.raises(NotImplementedError, match=r"int8\[32768, 8, 64, 128\].*fewer pages"):
        backend.check_offsets(Pages())  # pyrefly: ignore
