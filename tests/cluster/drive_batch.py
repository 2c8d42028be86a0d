"""Run by `test_batch` in a process of its own: `python -m tests.cluster.drive_batch FOLDER`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import ray

from jaxinfer.cluster.batch import ray_batch
from jaxinfer.config import EngineConfig
from tests.cluster.loading import Reciting


def main(folder: str) -> None:
    """Answer a file in two runs, the first of which is cut off; print what each did."""
    source, destination, pids = (Path(folder) / name for name in ("in.jsonl", "out", "pids"))
    pids.mkdir()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    report: dict = {"progress": []}

    def run(stop_at: int) -> None:
        def on_progress(done: int, total: int) -> None:
            report["progress"].append([done, total])
            if done == stop_at:
                raise KeyboardInterrupt

        end = ray_batch(
            source,
            destination,
            EngineConfig(),
            num_replicas=2,
            num_cpus=1.0,  # all that there are
            lines_per_shard=10,
            load=Reciting(pids, 0.05),
            on_progress=on_progress,
        )
        report["end"] = asdict(end)

    try:
        try:
            run(2)
        except KeyboardInterrupt:
            report["cut"] = sorted(path.name for path in destination.glob("part-*.jsonl"))
        run(-1)
        report["again"] = report["end"]
        run(-1)
    finally:
        ray.shutdown()
    report["engines"] = len(list(pids.iterdir()))
    sys.stdout.write("\n" + json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
