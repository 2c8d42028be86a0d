"""Host time of a step with many running requests, without a model.

    .venv/bin/python benchmarks/scheduler.py [--requests 256] [--dispatch]

A null model gives every row a token at once, so what is timed is the engine's own work: planning
the step, packing its arrays as for the device, and dealing with its tokens. All requests decode.
The median of the steps is shown, and CPU time beside wall time: on a busy machine only the first
means something. With `--dispatch` the default model is loaded too, and what is timed is how long
the calls of its programs keep the engine's thread from going on.
"""

from __future__ import annotations

import argparse
import statistics
import time

from jaxinfer.batch import ScheduledRow, StepPlan, StepResult
from jaxinfer.forward_batch import BatchLayout
from jaxinfer.page_pool import PagePool
from jaxinfer.page_tables import PageTables
from jaxinfer.request import Request
from jaxinfer.sampling_batch import SamplingPacker
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler import Scheduler

VOCAB_SIZE = 49_152
PAGE_SIZE = 16


def main() -> None:
    """Measure and print."""
    args = _arguments()
    n = args.requests
    pages_each = -(-(args.prompt_len + args.steps + 1) // PAGE_SIZE)
    scheduler = Scheduler(
        page_pool=PagePool((n + 1) * pages_each, PAGE_SIZE),
        max_num_seqs=n,
        max_num_batched_tokens=n * args.prompt_len,
    )
    for i in range(n):
        scheduler.add(_request(i, args))
    null = _NullModel(n, max_pages=args.max_model_len // PAGE_SIZE, num_pages=n * pages_each)
    scheduler.update(plan := scheduler.schedule(), null.run(plan))

    parts: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.steps - 1):
        with _timed(parts, "schedule"):
            plan = scheduler.schedule()
        with _timed(parts, "pack"):
            null.pack(plan)
        result = null.run(plan)
        with _timed(parts, "update"):
            scheduler.update(plan, result)
    _print(f"{n} running requests, {args.steps - 1} steps", parts)
    if args.dispatch:
        _print("dispatching a step of one row", _dispatch(args.steps))


def _dispatch(repeats: int) -> dict[str, list[tuple[float, float]]]:
    import jax

    from jaxinfer import EngineConfig, loading

    runner = loading.load(EngineConfig()).engine.runner
    runner.finish_warmup()
    parts: dict[str, list[tuple[float, float]]] = {}
    row = Request(
        request_id="r",
        prompt_token_ids=[5] * 9,
        params=SamplingParams(temperature=0),
        seed=0,
        max_total_tokens=16,
    )
    row.page_ids = [0]
    plan = StepPlan(rows=(ScheduledRow(row, 8, 1, True, 0),))
    for _ in range(repeats):
        with _timed(parts, "backbone"):
            hidden = runner.forward(plan)
        with _timed(parts, "head and sampler"):
            step = runner.sample(plan, hidden)
        jax.block_until_ready(step.sampled)
    return parts


class _NullModel:
    """Packs as `ModelRunner` does, and answers with the same token always."""

    def __init__(self, num_rows: int, max_pages: int, num_pages: int):
        self._layout = BatchLayout(
            num_tokens=num_rows,
            max_num_seqs=num_rows,
            max_pages=max_pages,
            num_slots=(num_pages * PAGE_SIZE,),
            page_size=PAGE_SIZE,
        )
        self._packer = SamplingPacker(VOCAB_SIZE)
        self._tables = PageTables(1, max_pages)
        self._num_rows = num_rows

    def pack(self, plan: StepPlan) -> None:
        self._layout.pack(plan, self._tables)
        self._packer.pack(plan.sampling_rows, self._num_rows)

    def run(self, plan: StepPlan) -> StepResult:
        n = len(plan.sampling_rows)
        return StepResult(token_ids=((5,),) * n, corrupted=(False,) * n, logprobs=(None,) * n)


class _timed:
    """Adds the wall and CPU seconds of a block to a list."""

    def __init__(self, parts: dict[str, list[tuple[float, float]]], name: str):
        self._seconds = parts.setdefault(name, [])

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._start
        self._seconds.append((time.perf_counter() - wall, time.thread_time() - cpu))


def _request(i: int, args: argparse.Namespace) -> Request:
    return Request(
        request_id=f"r{i}",
        prompt_token_ids=[i % 1000] * args.prompt_len,
        params=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=args.steps, ignore_eos=True),
        seed=i,
        max_total_tokens=args.prompt_len + args.steps,
        cache_salt=str(i),
    )


def _print(what: str, parts: dict[str, list[tuple[float, float]]]) -> None:
    print(f"{what}; µs, median")
    print("| part | wall | CPU |")
    print("| --- | ---: | ---: |")
    sums = [tuple(map(sum, zip(*step, strict=True))) for step in zip(*parts.values(), strict=True)]
    for name, seconds in {**parts, "sum": sums}.items():
        wall, cpu = (statistics.median(column) * 1e6 for column in zip(*seconds, strict=True))
        print(f"| {name} | {wall:.0f} | {cpu:.0f} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--dispatch", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
