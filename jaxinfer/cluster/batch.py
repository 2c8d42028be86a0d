"""`jaxinfer ray-batch`: a file of millions of requests on many engines, with Ray Data.

The input is cut into shards by bytes, and each shard has an output file of its own: nobody holds
all lines, and nobody has to know which of millions are done. A shard's file appears under its name
when it is complete; what a run that was cut off left of a shard is taken up where it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.server.app import create_app
from jaxinfer.server.batch_file import BatchFileError
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run_batch import LINES_PER_SEQUENCE, answer_file
from jaxinfer.server.state import ServerState

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of the input: bytes [start, end), whole lines.

    Attributes:
        index: From 0.
        start: First byte.
        end: Behind the last one.
    """

    index: int
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"part-{self.index:08d}.jsonl"


@dataclass(frozen=True, kw_only=True)
class ClusterBatch:
    """How a batch went.

    Attributes:
        shards: All of them.
        skipped: Those that an earlier run had done.
        done: Lines answered by this run, those that it found in unfinished shards included.
        failed: Those of them that tell of an error.
    """

    shards: int
    skipped: int
    done: int
    failed: int


def ray_batch(
    source: Path,
    destination: Path,
    config: EngineConfig,
    *,
    options: ServerOptions | None = None,
    num_replicas: int = 1,
    num_gpus: float = 0.0,
    num_cpus: float = 1.0,
    lines_per_shard: int = 1000,
    load: Callable[[EngineConfig], Any] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ClusterBatch:
    """Answer all lines of a file that have no answer yet, on a Ray cluster.

    Args:
        source: OpenAI's batch input, where every node can read it.
        destination: A folder for the output, where every node can write it.
        config: What each replica loads.
        options: Settings of the HTTP side.
        num_replicas: Engines at work.
        num_gpus: Of each replica.
        num_cpus: Of each replica.
        lines_per_shard: What is done at one go. A run goes on with the same number only.
        load: Loads the model; None for `jaxinfer.loading`.
        on_progress: Hears of shards done and in all.

    Raises:
        BatchFileError: A file cannot be read or written, or the two do not belong together.
        ray.exceptions.RayTaskError: An engine broke; run the same again to go on.
    """
    import ray

    source, destination = source.resolve(), destination.resolve()
    _claim(source, destination, lines_per_shard)
    shards = list(cut(source, lines_per_shard))
    todo = [shard for shard in shards if not (destination / shard.name).exists()]
    skipped = len(shards) - len(todo)
    on_progress(skipped, len(shards))
    done = failed = 0
    if todo:
        # Cut here, not by Ray's tasks: these would wait for ever where the engines take all CPUs.
        rows = ray.data.from_items([asdict(x) for x in todo], override_num_blocks=len(todo))
        results = rows.map_batches(
            Worker,
            batch_size=1,
            fn_constructor_kwargs={
                "source": source,
                "destination": destination,
                "config": config,
                "options": options or ServerOptions(),
                "load": load,
            },
            compute=ray.data.ActorPoolStrategy(size=min(num_replicas, len(todo))),
            num_gpus=num_gpus,
            num_cpus=num_cpus,
        )
        for number, row in enumerate(results.iter_rows(), start=skipped + 1):
            done, failed = done + row["done"], failed + row["failed"]
            on_progress(number, len(shards))
    return ClusterBatch(shards=len(shards), skipped=skipped, done=int(done), failed=int(failed))


class Worker:
    """An engine that answers shards; an actor of Ray Data."""

    def __init__(
        self,
        *,
        source: Path,
        destination: Path,
        config: EngineConfig,
        options: ServerOptions,
        load: Callable[[EngineConfig], Any] | None,
    ):
        self._source, self._destination = source, destination
        self._state = ServerState(options)
        self._state.serve((load or _load)(config))
        self._app = create_app(self._state)
        self._width = LINES_PER_SEQUENCE * config.max_num_seqs * config.data_parallel_size

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a shard, or what is left of it."""
        [index], [start], [end] = (batch[name].tolist() for name in ("index", "start", "end"))
        shard = Shard(index=index, start=start, end=end)
        finished = self._destination / shard.name
        unfinished = finished.with_suffix(".unfinished")
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / shard.name
            with self._source.open("rb") as file:
                file.seek(shard.start)
                lines.write_bytes(file.read(shard.end - shard.start))
            progress = answer_file(self._app, lines, unfinished, self._width)
        os.replace(unfinished, finished)
        return {"done": np.array([progress.done]), "failed": np.array([progress.failed])}


def cut(source: Path, lines_per_shard: int) -> Iterator[Shard]:
    """Yield the shards of a file, of so many lines each.

    Raises:
        BatchFileError: It cannot be read.
    """
    index = start = end = num_lines = 0
    try:
        with source.open("rb") as file:
            for line in file:
                end += len(line)
                num_lines += bool(line.strip())
                if num_lines == lines_per_shard:
                    yield Shard(index=index, start=start, end=end)
                    index, start, num_lines = index + 1, end, 0
    except OSError as error:
        raise BatchFileError(f"{source} cannot be read: {error.strerror}") from None
    if num_lines:
        yield Shard(index=index, start=start, end=end)


def _claim(source: Path, destination: Path, lines_per_shard: int) -> None:
    """Note what a folder is the output of, or raise if it is that of something else."""
    try:
        status = source.stat()
        ours = {
            "source": str(source),
            "bytes": status.st_size,
            "modified_ns": status.st_mtime_ns,
            "lines_per_shard": lines_per_shard,
        }
        destination.mkdir(parents=True, exist_ok=True)
        manifest = destination / MANIFEST
        with contextlib.suppress(FileNotFoundError):
            known = json.loads(manifest.read_text())
            if known != ours:
                changed = [name for name in ours if known.get(name) != ours[name]]
                raise BatchFileError(
                    f"{destination} is the output of another run: {', '.join(changed)} differ; "
                    "give another --output, or remove the folder to start anew"
                )
            return
        if any(destination.iterdir()):
            raise BatchFileError(f"{destination} is not empty and no output of a batch")
        manifest.write_text(json.dumps(ours))
    except OSError as error:
        name = error.filename or source
        raise BatchFileError(f"{name} cannot be used: {error.strerror}") from None


def _load(config: EngineConfig) -> Any:
    from jaxinfer import loading

    return loading.load_replicas(config, progress=False)
