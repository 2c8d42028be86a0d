"""What the Hopper kernels decide before they run: tiles, splits, sizes and refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import RaggedBatch, mosaic
from pallas_kernels.mosaic import combine as combining
from pallas_kernels.mosaic import decode_plan, prefill_plan
from pallas_kernels.mosaic.softmax import ScoreRule

T, B = 96, 5


def batch_of(rows: list[tuple[int, int]]) -> RaggedBatch:
    rows = sorted(rows, key=lambda row: row[0] != 1)
    starts = np.concatenate([[0], np.cumsum([new for new, _ in rows])])
    starts = np.concatenate([starts, np.repeat(starts[-1:], B - len(rows))])
    return RaggedBatch(
        page_table=jnp.zeros((B, 4), jnp.int32),
        seq_lens=jnp.asarray([keys for _, keys in rows] + [0] * (B - len(rows)), jnp.int32),
        query_start_loc=jnp.asarray(starts, jnp.int32),
        num_decode_rows=jnp.int32(sum(new == 1 for new, _ in rows)),
        num_rows=jnp.int32(len(rows)),
    )


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    rows, left = [], T
    for _ in range(draw(st.integers(0, B))):
        new = min(draw(st.sampled_from([0, 1, 1, 7, 8, 9, 15, 16, 17, 33, T])), left)
        rows.append((new, new + draw(st.integers(0, 40))))
        left -= new
    return batch_of(rows)


plan_tiles = jax.jit(prefill_plan.plan_tiles, static_argnames=("num_tokens", "tile_tokens", "fill"))


@pytest.mark.parametrize("tile_tokens", [16, 128])
@pytest.mark.parametrize("fill", [True, False])
@settings(max_examples=40)
@given(batch=batches())
def test_tiles_have_each_token_of_a_chunk_once(tile_tokens, fill, batch: RaggedBatch) -> None:
    plan = np.asarray(plan_tiles(batch, num_tokens=T, tile_tokens=tile_tokens, fill=fill))
    found: dict[int, tuple[int, int, int]] = {}
    for row, eighths, start, stop, position, seq_len in plan.tolist():
        for offset in range(start, stop):
            token = eighths * 8 + offset
            assert token not in found
            found[token] = (row, position + offset, seq_len) if seq_len else (-1, -1, 0)
    starts, seq_lens = np.asarray(batch.query_start_loc), np.asarray(batch.seq_lens)
    expected = dict.fromkeys(range(T), (-1, -1, 0)) if fill else {}
    for row in range(int(batch.num_decode_rows), int(batch.num_rows)):
        first, end, keys = int(starts[row]), int(starts[row + 1]), int(seq_lens[row])
        expected |= {t: (row, keys - end + t, keys) for t in range(first, end)}
    assert found == expected


def shape_of(
    window: int | None, split_blocks: int | None, num_splits: int
) -> decode_plan.DecodeShape:
    tiles = dataclasses.replace(mosaic.default_decode_tiles(64), min_split_len=64)
    return decode_plan.DecodeShape(
        group=2,
        head_dim=64,
        dtype=jnp.bfloat16,
        copy_len=16,
        page_size=16,
        max_keys=1000,
        max_query_len=4,
        num_rows=3,
        num_splits=num_splits,
        split_blocks=split_blocks,
        rule=ScoreRule(1.0, None),
        sliding_window=window,
        tiles=tiles,
        interpret=None,
    )


@pytest.mark.parametrize("window", [None, 1, 200])
@pytest.mark.parametrize("split_blocks", [None, 2])
@settings(max_examples=40)
@given(keys=st.lists(st.sampled_from([1, 4, 63, 64, 65, 129, 640, 999, 2000]), min_size=3,
                     max_size=3), new=st.integers(0, 4))  # fmt: skip
def test_splits_have_each_block_that_is_seen_once(window, split_blocks, keys, new) -> None:
    num_splits = 3 if split_blocks is None else decode_plan.fixed_splits(
        min(1000, (window or 1000) + 3), 1000, 128)  # fmt: skip
    shape = shape_of(window, split_blocks, num_splits)
    lengths = jnp.minimum(jnp.full(3, new), jnp.asarray(keys))
    plan = np.asarray(decode_plan.plan_splits(jnp.asarray(keys), lengths, shape))
    for row, n in enumerate(np.asarray(lengths).tolist()):
        seq_len = min(keys[row], 1000) if n else 0
        oldest = max(seq_len - n - window + 1, 0) if window else 0
        blocks = []
        for first_key, steps, *_ in plan[row].tolist():
            blocks += range(first_key // 64, first_key // 64 + steps)
            if split_blocks and steps:
                assert first_key // 128 == (first_key + steps * 64 - 1) // 128
        assert blocks == list(range(oldest // 64, -(-seq_len // 64)))


@pytest.mark.parametrize("splits", [3, 40])
def test_parts_that_a_row_does_not_reach_change_no_bit(splits: int) -> None:
    rng = np.random.default_rng(0)
    acc = rng.normal(size=(2, splits, 4, 8)).astype(np.float32)
    row_max, row_sum = rng.normal(size=(2, 2, splits, 4)).astype(np.float32)
    row_sum = np.abs(row_sum)
    combine = jax.jit(combining.combine)
    out = combine(*map(jnp.asarray, (acc, row_max, row_sum)), None)
    weights = np.exp2(row_max.astype(np.float64) - row_max.max(1, keepdims=True))
    expected = (acc * weights[..., None]).sum(1) / (row_sum * weights).sum(1)[..., None]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    more = [(0, 0), (0, 37), (0, 0)]
    acc = np.pad(acc, [*more, (0, 0)], constant_values=np.nan)
    row_max, row_sum = (np.pad(x, more) for x in (row_max, row_sum))
    again = combine(*map(jnp.asarray, (acc, row_max, row_sum)), None)
    np.testing.assert_array_equal(out, again)


FINE = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "head_dim": 128, "page_size": 16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float32"}, "takes queries of bfloat16 or float16, got float32"),
        ({"kv_dtype": "int8"}, "in the dtype of the queries, bfloat16, got int8"),
        ({"kv_dtype": "float8_e4m3fn"}, "got float8_e4m3fn"),
        ({"head_dim": 112}, "takes head dims 64, 80, 96, 128, 192, 256, got 112"),
        ({"page_size": 4}, "at least 8, got 4"),
        ({"page_size": 24}, "power of two of tokens, at least 8, got 24"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(change: dict, words: str) -> None:
    assert mosaic.refusal((9, 0), **FINE) is None
    assert words in (mosaic.refusal((9, 0), **{**FINE, **change}) or "")


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (10, 0), (12, 0)])
def test_only_hopper_runs_them(capability: tuple[int, int] | None) -> None:
    assert "needs compute capability 9.0" in (mosaic.refusal(capability, **FINE) or "")


@pytest.mark.parametrize("kernel", ["paged_prefill", "paged_decode"])
def test_a_device_without_them_is_refused_before_anything_is_compiled(kernel: str) -> None:
    q, pages = jnp.zeros((8, 2, 64), jnp.bfloat16), jnp.zeros((2, 1, 16, 64), jnp.bfloat16)
    tiles = {
        "paged_prefill": mosaic.default_prefill_tiles,
        "paged_decode": mosaic.default_decode_tiles,
    }[kernel](64)
    with pytest.raises(NotImplementedError, match=r"for Hopper needs compute capability 9\.0"):
        getattr(mosaic, kernel)(q, pages, pages, batch_of([(8, 8)]), scale=1.0, tiles=tiles)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_default_tiles_are_valid(head_dim: int) -> None:
    assert mosaic.default_prefill_tiles(head_dim).shared_bytes < 227 * 1024
    assert mosaic.default_decode_tiles(head_dim).shared_bytes < 227 * 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_k": 32}, "block_k must be 64, 128, 192 or 256, got 32"),
        ({"num_stages": 1}, "num_stages must be 2 to 8, got 1"),
        ({"num_stages": 8}, "a block has 232448"),
    ],
)
def test_tiles_that_cannot_work_are_refused(change: dict[str, int], words: str) -> None:
    for tiles in (mosaic.default_prefill_tiles(256), mosaic.default_decode_tiles(256)):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(tiles, **change)


def test_tiles_that_would_spill_are_refused() -> None:
    with pytest.raises(ValueError, match="need 224 registers"):
        mosaic.MosaicPrefillTiles(head_dim=256, block_k=128, num_stages=2)
