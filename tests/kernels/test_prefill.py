"""Prefill over pages by the portable GPU kernel, interpreted, against the float64 oracle."""

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

from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.tiles import PrefillTiles
from pallas_kernels.triton import backend, prefill, prefill_kernel
from pallas_kernels.triton.prefill import paged_prefill
from tests.kernels.oracle import Case, Step, attend, cases, make_step

# Small tiles, so that short chunks have several: 32 rows are 10 tokens of 3 heads each.
TILES = PrefillTiles(block_q=32, block_k=32, num_warps=4, num_stages=2)

CHUNKS = ((2, 2), (70, 90), (0, 5), (33, 384), (17, 17))
"""Chunks at and behind the start of their sequences, one of them empty."""


# Interpreting takes milliseconds, compiling the interpreter's program seconds: drawn steps share
# it.
STATIC = ("scale", "sliding_window", "logit_softcap")
jitted = jax.jit(
    functools.partial(paged_prefill, tiles=TILES, interpret=True), static_argnames=STATIC
)


def run(step: Step, tiles: PrefillTiles = TILES, **keywords: Any) -> jax.Array:
    """Run the kernel as it is now, bugs that were planted included.

    The step has no one-token rows.
    """
    how = functools.partial(paged_prefill, tiles=tiles, interpret=True, **keywords)
    return attend(how, step)


def slow(*values: Any) -> Any:
    """Mark a parameter that others stand for."""
    return pytest.param(*values, marks=pytest.mark.slow)


@st.composite
def chunks(draw: st.DrawFn) -> Case:
    """Draw steps without one-token rows."""
    case = draw(cases(num_heads=6, num_kv_heads=2, head_dim=16, max_tokens=64, max_rows=4))
    return dataclasses.replace(case, rows=tuple(row for row in case.rows if row[0] != 1))


@settings(max_examples=15)
@given(case=chunks())
def test_ragged_chunks_equal_the_oracle_and_read_no_poison(case: Case) -> None:
    step = make_step(case)
    step.check(attend(jitted, step))


PAGES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")
DTYPES = {
    "float32": ("float32", "float8_e4m3fn"),
    "bfloat16": ("bfloat16", "float16", "int8"),
    "float16": ("float16", "int8"),
}
"""Pairs tested by default: each dtype of queries and of pages, and each kind of mixture."""


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (dtype, pages) if pages in default else slow(dtype, pages)
        for dtype, default in DTYPES.items()
        for pages in PAGES
    ],
)
def test_dtypes_stay_within_the_precision_of_the_queries(dtype: str, kv_dtype: str) -> None:
    """Pages are what they are: one byte a number costs no precision behind the pages."""
    step = make_step(Case(CHUNKS, dtype=dtype, kv_dtype=kv_dtype, sliding_window=50))
    step.check(run(step))


# 20 is no multiple of what a matrix product takes.
@pytest.mark.parametrize("head_dim", [20, slow(64), 80, slow(96), 128, slow(192), 256])
def test_head_dims_with_all_features(head_dim: int) -> None:
    features = {"sliding_window": 23, "logit_softcap": 2.0, "sinks": True}
    step = make_step(Case(((70, 90), (3, 40)), head_dim=head_dim, **features))
    step.check(run(step))


@pytest.mark.parametrize("head_dim", [80, slow(128)])
@pytest.mark.parametrize(
    "feature", [{}, {"sliding_window": 23}, {"logit_softcap": 2.0}, {"sinks": True}]
)
def test_each_feature_alone(head_dim: int, feature: dict[str, Any]) -> None:
    step = make_step(Case(((70, 90), (3, 40)), head_dim=head_dim, **feature))
    step.check(run(step))


# With 48 heads a group is more than a tile.
@pytest.mark.parametrize("group", [1, slow(3), 5, slow(8), slow(14), 16, 48])
def test_query_heads_per_key_head(group: int) -> None:
    case = Case(((40, 50), (3, 3)), num_heads=2 * group, num_kv_heads=2, max_tokens=48)
    step = make_step(case)
    step.check(run(step))


@pytest.mark.parametrize(
    ("block_q", "block_k", "window"),
    [(16, 64, 40), (128, 16, None), slow(16, 64, None), slow(128, 16, 40)],
)
def test_any_tiles_give_the_same(block_q: int, block_k: int, window: int | None) -> None:
    tiles = PrefillTiles(block_q=block_q, block_k=block_k, num_warps=4, num_stages=2)
    step = make_step(Case(CHUNKS, sliding_window=window, sinks=True))
    step.check(run(step, tiles))


def test_programs_take_turns_where_there_are_more_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of two tokens waste most of a tile, those of a tile and one token nearly half."""
    monkeypatch.setattr(prefill, "NUM_MULTIPROCESSORS", 4)
    tokens = 10
    for rows in (((2, 2),) * 8, ((tokens + 1, 50),) * 8, ((2, 9),) * 7 + ((82, 82),)):
        step = make_step(Case(rows, max_tokens=sum(new for new, _ in rows)))
        step.check(run(step))


def test_tokens_of_other_rows_are_left_alone() -> None:
    step = make_step(Case(((1, 30), (1, 7), (20, 50))))
    before = jnp.full(step.arguments[0].shape, 7.0)
    out = np.asarray(run(step, out=before))
    assert (out[:2] == 7).all()
    assert (out[22:] == 7).all()
    np.testing.assert_allclose(out[2:22], step.expected[2:22], atol=1e-5)


def test_a_chunk_is_bitwise_the_same_whatever_its_neighbours() -> None:
    def chunk(*others: tuple[int, int]) -> np.ndarray:
        # The same pages each time: only how many rows the batch says it has differs.
        q, k, v, batch = make_step(Case(((30, 50), (40, 200), (60, 60)))).arguments
        last = 1 + len(others)
        batch = batch._replace(
            query_start_loc=jnp.minimum(batch.query_start_loc, batch.query_start_loc[last])
        )
        q, k, v = (jnp.asarray(x) for x in (q, k, v))
        out = paged_prefill(q, k, v, batch, scale=0.2, tiles=TILES, interpret=True)
        return np.asarray(out[:30])

    alone = chunk()
    assert alone.any()
    np.testing.assert_array_equal(alone, chunk((40, 200), (60, 60)))


def keys_visited(monkeypatch: pytest.MonkeyPatch, case: Case) -> int:
    """Return how many keys, of all tiles together, are computed."""
    visited: list[int] = []
    original = prefill_kernel._attend_block

    def counting(block, carry, **keywords):
        jax.debug.callback(lambda _: visited.append(TILES.block_k), block)
        return original(block, carry, **keywords)

    monkeypatch.setattr(prefill_kernel, "_attend_block", counting)
    step = make_step(case)
    step.check(run(step))
    jax.effects_barrier()
    return sum(visited)


@pytest.mark.parametrize(("window", "most"), [(None, 320), (32, 96)])
def test_keys_that_nobody_sees_are_not_visited(
    monkeypatch: pytest.MonkeyPatch, window: int | None, most: int
) -> None:
    """Two tiles of 16 tokens behind 288 others: all keys so far, or those of the window."""
    case = Case(((32, 320),), num_heads=2, num_kv_heads=1, sliding_window=window)
    visited = keys_visited(monkeypatch, case)
    assert 2 * min(most, window or most) <= visited <= 2 * most


@given(factor=st.floats(2.0**-12, 64.0, width=32))
def test_a_hidden_score_times_any_scale_is_exact(factor: float) -> None:
    """GPUs fuse product and subtraction: rounding alone would leave 2**73, and exp2 of that."""
    product = np.float32(prefill_kernel.UNSEEN) * np.float32(factor)
    assert float(product) == float(np.float32(prefill_kernel.UNSEEN)) * factor


def test_scales_must_be_positive() -> None:
    step = make_step(Case(CHUNKS))
    step.keywords["scale"] = -1.0
    with pytest.raises(ValueError, match="scale=-1.0"):
        run(step)


def test_pages_that_offsets_cannot_reach_are_refused() -> None:
    """2 to 4 GiB of one-byte numbers, which the lowering would address with 32 signed bits."""
    shape = jax.ShapeDtypeStruct
    pages = shape((2**17 + 1, 8, 16, 128), jnp.int8)
    scales = shape((2**17 + 1, 8, 16), jnp.float32)
    batch = RaggedBatch(*(shape(n, jnp.int32) for n in ((1, 4), (1,), (2,), (), ())))

    def attention(q, k, v, batch, k_scales, v_scales):
        how = {"k_scales": k_scales, "v_scales": v_scales, "scale": 1.0, "tiles": TILES}
        return paged_prefill(q, k, v, batch, interpret=True, **how)

    with pytest.raises(NotImplementedError, match="2 to 4 GiB"):
        jax.eval_shape(
            attention, shape((2, 8, 128), jnp.bfloat16), pages, pages, batch, scales, scales
        )


class TestPlantedBugs:
    """What the tests above would say to mistakes: each is made, and must be seen."""

    def broken(self, case: Case) -> None:
        step = make_step(case)
        with pytest.raises(AssertionError):
            step.check(run(step))

    def test_a_window_off_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = prefill.PrefillShape
        monkeypatch.setattr(
            prefill,
            "PrefillShape",
            lambda **fields: original(**{**fields, "sliding_window": 24}),
        )
        self.broken(Case(CHUNKS, sliding_window=23))

    def test_unmasked_loads_of_pages_and_their_ids(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = backend.load
        monkeypatch.setattr(
            backend,
            "load",
            lambda ref, index, *, mask=None: original(
                ref, index, mask=mask if len(ref.shape) == 3 else None
            ),
        )
        self.broken(Case(CHUNKS))

    def test_the_next_query_head(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = prefill_kernel._rows
        monkeypatch.setattr(
            prefill_kernel, "_rows", lambda tokens, heads, part: original(tokens, heads ^ 1, part)
        )
        step = make_step(Case(CHUNKS, num_heads=6, num_kv_heads=6))
        # Queries and results are both taken from the neighbour, but not its keys.
        with pytest.raises(AssertionError):
            step.check(run(step))

    def test_a_tile_too_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = prefill._tile_table

        def short(*args):
            table, num_tiles = original(*args)
            return table, num_tiles - 1

        monkeypatch.setattr(prefill, "_tile_table", short)
        self.broken(Case(((11, 50),) * 8, max_tokens=88))
