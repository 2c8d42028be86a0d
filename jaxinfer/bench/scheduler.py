"""Host time of a step with many running requests, without a model.

A null model gives every row a token at once, so what is timed is the engine's own work: planning
the step, packing its arrays as for the device, and dealing with its tokens. All requests decode.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from jaxinfer.batch import ScheduledRow, StepPlan, StepResult
from jaxinfer.bench.machine import describe_machine
from jaxinfer.forward_batch import BatchLayout
from jaxinfer.model_runner import ModelRunner
from jaxinfer.page_pool import PagePool
from jaxinfer.page_tables import PageTables
from jaxinfer.request import Request
from jaxinfer.sampling_batch import SamplingPacker
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler import Scheduler

VOCAB_SIZE = 49_152
PAGE_SIZE = 16

Timings = dict[str, list[tuple[float, float]]]
"""Part of a step → wall and CPU seconds, step by step."""


def run_scheduler(
    *, num_requests: int, prompt_tokens: int, num_steps: int, max_model_len: int = 8192
) -> dict[str, Any]:
    """Measure `num_steps` decode steps of so many requests; return medians in microseconds.

    CPU time stands beside wall time: on a busy machine only the first means something.
    """
    pages_each = -(-(prompt_tokens + num_steps + 2) // PAGE_SIZE)
    scheduler = Scheduler(
        page_pool=PagePool((num_requests + 1) * pages_each, PAGE_SIZE),
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * prompt_tokens,
    )
    for i in range(num_requests):
        scheduler.add(_request(i, prompt_tokens, num_steps + 1))
    null = _NullModel(
        num_requests, max_pages=max_model_len // PAGE_SIZE, num_pages=num_requests * pages_each
    )
    scheduler.update(plan := scheduler.schedule(), null.run(plan))

    parts: Timings = {}
    for _ in range(num_steps):
        with _timed(parts, "schedule"):
            plan = scheduler.schedule()
        with _timed(parts, "pack"):
            null.pack(plan)
        result = null.run(plan)
        with _timed(parts, "update"):
            scheduler.update(plan, result)
    return {
        "benchmark": "scheduler",
        "machine": describe_machine(),
        "workload": {
            "num_requests": num_requests,
            "prompt_tokens": prompt_tokens,
            "num_steps": num_steps,
        },
        "parts": _medians(parts),
    }


def run_dispatch(runner: ModelRunner, repeats: int) -> dict[str, dict[str, float]]:
    """Return how long calling a step's programs keeps the engine's thread, one row a step."""
    runner.finish_warmup()
    parts: Timings = {}
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
    return _medians(parts)


def scheduler_table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown tables."""
    machine, work = result["machine"], result["workload"]
    lines = [
        f"{machine['device']}, load {machine['load_average']}, Python {machine['python']}",
        "",
        f"{work['num_requests']} running requests, {work['num_steps']} steps; µs, median",
        *_rows(result["parts"]),
    ]
    if "dispatch" in result:
        lines += ["", "dispatching a step of one row; µs, median", *_rows(result["dispatch"])]
    return "\n".join(lines)


def _rows(parts: dict[str, dict[str, float]]) -> list[str]:
    rows = [f"| {name} | {t['wall_us']:.0f} | {t['cpu_us']:.0f} |" for name, t in parts.items()]
    return ["| part | wall | CPU |", "| --- | ---: | ---: |", *rows]


def _medians(parts: Timings) -> dict[str, dict[str, float]]:
    sums = [tuple(map(sum, zip(*step, strict=True))) for step in zip(*parts.values(), strict=True)]
    medians = {}
    for name, seconds in {**parts, "sum": sums}.items():
        wall, cpu = (statistics.median(column) * 1e6 for column in zip(*seconds, strict=True))
        medians[name] = {"wall_us": wall, "cpu_us": cpu}
    return medians


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

    def __init__(self, parts: Timings, name: str):
        self._seconds = parts.setdefault(name, [])

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._start
        self._seconds.append((time.perf_counter() - wall, time.thread_time() - cpu))


def _request(i: int, prompt_tokens: int, new_tokens: int) -> Request:
    return Request(
        request_id=f"r{i}",
        prompt_token_ids=[i % 1000] * prompt_tokens,
        params=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=new_tokens, ignore_eos=True),
        seed=i,
        max_total_tokens=prompt_tokens + new_tokens,
        cache_salt=str(i),
    )
