"""A file cut into shards, answered by several engines, and gone on with after a cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.cluster.batch import Worker, cut, ray_batch
from jaxinfer.config import EngineConfig
from jaxinfer.server.batch_file import BatchFileError
from jaxinfer.server.options import ServerOptions
from tests.cluster.loading import Reciting


def write_lines(path: Path, num_lines: int) -> None:
    lines = [
        {
            "custom_id": f"id-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{i} hello", "max_tokens": 4, "temperature": 0},
        }
        for i in range(num_lines)
    ]
    # Blank lines are none.
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")


def answers(folder: Path) -> list[dict]:
    parts = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


@pytest.mark.parametrize("num_lines", [1, 9, 10, 11, 25])
def test_shards_are_the_file_in_order_and_whole_lines(tmp_path: Path, num_lines: int) -> None:
    source = tmp_path / "in.jsonl"
    write_lines(source, num_lines)
    shards = list(cut(source, 10))
    data = source.read_bytes()
    assert [shard.index for shard in shards] == list(range(-(-num_lines // 10)))
    assert b"".join(data[s.start : s.end] for s in shards).split() == data.split()
    for shard in shards:
        lines = [line for line in data[shard.start : shard.end].split(b"\n") if line.strip()]
        assert 1 <= len(lines) <= 10 and all(json.loads(line) for line in lines)


def test_a_worker_takes_up_what_is_left_of_a_shard(tmp_path: Path) -> None:
    source, destination, pids = (tmp_path / name for name in ("in.jsonl", "out", "pids"))
    write_lines(source, 6)
    destination.mkdir()
    pids.mkdir()
    worker = Worker(
        source=source,
        destination=destination,
        config=EngineConfig(),
        options=ServerOptions(),
        load=Reciting(pids),
    )
    [shard] = cut(source, 10)
    batch = {name: np.array([getattr(shard, name)]) for name in ("index", "start", "end")}
    try:
        assert worker(batch)["done"].tolist() == [6]
        finished = destination / shard.name
        # Two answers and a half, as a run leaves them that is killed.
        whole = finished.read_bytes().splitlines(keepends=True)
        finished.with_suffix(".unfinished").write_bytes(b"".join(whole[:2]) + whole[2][:20])
        finished.unlink()
        before = worker._state.engine.stats.finished["length"]
        assert worker(batch)["done"].tolist() == [6]
        assert worker._state.engine.stats.finished["length"] == before + 4
    finally:
        worker._state.close()
    assert {a["custom_id"] for a in answers(destination)} == {f"id-{i}" for i in range(6)}
    assert not list(destination.glob("*.unfinished"))


def test_an_output_belongs_to_one_input(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    source, destination = tmp_path / "in.jsonl", tmp_path / "out"
    config = EngineConfig()
    with pytest.raises(BatchFileError, match="cannot be used"):
        ray_batch(source, destination, config)
    source.write_text("")
    assert ray_batch(source, destination, config).shards == 0
    with pytest.raises(BatchFileError, match="lines_per_shard differ"):
        ray_batch(source, destination, config, lines_per_shard=7)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(BatchFileError, match="not empty"):
        ray_batch(source, tmp_path / "other", config)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_was_cut_off_goes_on_on_two_engines(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from tests.cluster.test_serve import run

    write_lines(tmp_path / "in.jsonl", 298)
    report = run("tests.cluster.drive_batch", str(tmp_path))
    assert 2 <= len(report["cut"]) < 30
    again, end = report["again"], report["end"]
    assert again["shards"] == 30 and 2 <= again["skipped"] < 30 and again["failed"] == 0
    # Nothing is left for a third run, which loads no engine.
    assert end == {"shards": 30, "skipped": 30, "done": 0, "failed": 0}
    assert report["progress"][-1] == [30, 30]
    found = answers(tmp_path / "out")
    assert sorted(a["custom_id"] for a in found) == sorted(f"id-{i}" for i in range(298))
    assert {a["response"]["body"]["choices"][0]["text"] for a in found} == {"Grü"}
