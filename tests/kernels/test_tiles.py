"""Tile sizes: what is refused, the table's round trip, and how autotune chooses."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from pallas_kernels import autotune, tiles
from pallas_kernels.autotune import GpuTimer, candidates, default_tiles, tune, tune_all
from pallas_kernels.capability import FLOAT_DTYPES, GENERATIONS, SCALED_DTYPES
from pallas_kernels.tiles import (
    DecodeTiles,
    PrefillTiles,
    TileKey,
    decode_tiles,
    prefill_tiles,
    read_table,
    write_table,
)

KEY = TileKey.of("sm_90", 128, "bfloat16", "bfloat16")
PREFILL = PrefillTiles(block_q=64, block_k=32, num_warps=4, num_stages=3)
DECODE = DecodeTiles(block_k=128, num_splits=8, num_warps=2, num_stages=4)


@pytest.mark.parametrize(
    ("record", "change", "words"),
    [
        (PREFILL, {"block_q": 48}, "block_q must be a power of two, got 48"),
        (PREFILL, {"block_q": 8}, r"block_q must be a whole number in \[16, 256\], got 8"),
        (PREFILL, {"num_stages": 0}, "num_stages"),
        (PREFILL, {"num_warps": 32}, "num_warps"),
        (DECODE, {"block_k": 1024}, "block_k"),
        (DECODE, {"num_splits": 3}, "num_splits must be a power of two, got 3"),
        (KEY, {"generation": "sm_70"}, "sm_80, sm_89"),
    ],
)
def test_sizes_that_cannot_work_are_refused(record, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(record, **change)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_case_has_sizes(generation: str) -> None:
    """Rules cover all; what a table measured is used instead, and is as valid."""
    dtypes = itertools.product(FLOAT_DTYPES, (*FLOAT_DTYPES, *SCALED_DTYPES))
    for (dtype, kv_dtype), head_dim in itertools.product(dtypes, (16, 64, 80, 96, 128, 192, 256)):
        key = TileKey.of(generation, head_dim, dtype, kv_dtype)
        assert isinstance(prefill_tiles(key), PrefillTiles)
        assert isinstance(decode_tiles(key), DecodeTiles)


def test_the_table_reads_back_what_was_written() -> None:
    other = dataclasses.replace(KEY, kv_dtype="int8")
    entries = {("prefill", KEY): PREFILL, ("decode", KEY): DECODE, ("decode", other): DECODE}
    assert read_table(write_table(entries)) == entries
    assert read_table(write_table({})) == {}


def test_measured_sizes_come_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_table", lambda: {("prefill", KEY): PREFILL})
    assert prefill_tiles(KEY) == PREFILL
    assert prefill_tiles(dataclasses.replace(KEY, head_dim=64)) != PREFILL
    assert decode_tiles(KEY) == default_tiles("decode", KEY)


@pytest.mark.parametrize(
    "entry",
    [
        '{"kernel": "prefil", "key": {}, "tiles": {}}',
        '{"kernel": "decode", "key": {"chip": "H100"}, "tiles": {}}',
        write_table({("decode", KEY): DECODE}).replace('"num_splits": 8', '"num_splits": 7'),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(entry: str) -> None:
    text = entry if "entries" in entry else f'{{"entries": [{entry}]}}'
    with pytest.raises(ValueError, match="must be|cannot be read"):
        read_table(text)


def test_candidates_start_with_the_default_and_are_all_different() -> None:
    for kernel in autotune.KERNELS:
        found = list(candidates(kernel, KEY))
        assert found[0] == default_tiles(kernel, KEY)
        assert len({*found}) == len(found) > 10


def test_the_fastest_sizes_that_work_win() -> None:
    lines: list[str] = []

    def measure(kernel, key, sizes) -> float:
        if sizes.num_warps == 4:
            raise autotune.WrongResult("off by 3")
        return 1e-3 / sizes.block_q / sizes.block_k / sizes.num_stages

    best = tune("prefill", KEY, measure, lines.append)
    assert best == PrefillTiles(block_q=256, block_k=128, num_warps=8, num_stages=4)
    assert sum("WrongResult: off by 3" in line for line in lines) > 1


def test_sizes_hardly_faster_than_the_default_do_not_win() -> None:
    default = default_tiles("decode", KEY)
    measured = {default: 1.02}
    assert tune("decode", KEY, lambda _, __, x: measured.get(x, 1.0), str) == default
    measured = {default: 1.05}
    assert tune("decode", KEY, lambda _, __, x: measured.get(x, 1.0), str) != default


def test_other_mistakes_than_bad_sizes_are_not_swallowed() -> None:
    def measure(kernel, key, sizes) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tune("decode", KEY, measure, str)


def test_tuning_updates_the_table_and_keeps_its_other_entries(tmp_path: Path) -> None:
    table, other = tmp_path / "tiles.json", dataclasses.replace(KEY, generation="sm_80")
    table.write_text(write_table({("prefill", other): PREFILL, ("prefill", KEY): PREFILL}))
    nothing_works = dataclasses.replace(KEY, head_dim=64)

    def measure(kernel, key, sizes) -> float:
        if key == nothing_works:
            raise autotune.WrongResult
        return sizes.num_stages

    lines: list[str] = []
    jobs = [("prefill", KEY), ("decode", KEY), ("decode", nothing_works)]
    tune_all(jobs, measure, table, lines.append)
    entries = read_table(table.read_text())
    assert {*entries} == {("prefill", other), ("prefill", KEY), ("decode", KEY)}
    assert entries["prefill", other] == PREFILL
    assert entries["prefill", KEY].num_stages == 2
    assert lines[-1].endswith("nothing works")


def test_a_machine_without_a_gpu_says_so(capsys: pytest.CaptureFixture) -> None:
    assert autotune.main([]) == 1
    assert capsys.readouterr().err == (
        "autotune needs a GPU to measure on; the device here is cpu\n"
    )


@pytest.mark.parametrize(
    ("kernel", "rows"), [("prefill", ((20, 40), (9, 9))), ("decode", ((1, 40), (1, 3)))]
)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_the_timer_times_and_compares(
    monkeypatch: pytest.MonkeyPatch, kernel: str, rows, kv_dtype: str
) -> None:
    """By the interpreter; on a GPU only the numbers differ."""
    monkeypatch.setattr(autotune, "STEPS", {kernel: rows})
    monkeypatch.setattr(autotune, "NUM_HEADS", 2)
    monkeypatch.setattr(autotune, "NUM_KV_HEADS", 1)
    key = TileKey.of("sm_80", 64, "bfloat16", kv_dtype)
    timer = GpuTimer(repeats=1, interpret=True)
    sizes = PREFILL if kernel == "prefill" else dataclasses.replace(DECODE, block_k=16)
    assert timer(kernel, key, sizes) > 0
    timer._expected += 1
    with pytest.raises(autotune.WrongResult):
        timer(kernel, key, sizes)
