"""Seconds from the start of a Python process to the first token of a model.

    .venv/bin/python benchmarks/startup.py [--model PATH] [--repeats 3]

The first start has an empty compilation cache, the others find it full. Each is a process of its
own; its CPU time stands beside the wall time, which means little on a busy machine. The child also
says when it was done with importing, loading and the first token, and how many programs were ready
then: the others are compiled while it serves.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

CHILD = """
import json, sys, time
start, asked = time.time(), json.loads(sys.argv[1])
from jaxinfer import LLM, SamplingParams
imported = time.time()
llm = LLM(asked["model"], compilation_cache_dir=asked["cache"])
loaded = time.time()
llm.generate(asked["prompt"], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
first = time.time()
stats = llm.stats
print(json.dumps({
    "python": start - asked["time"], "import": imported - start, "load": loaded - imported,
    "generate": first - loaded, "sum": first - asked["time"], "cpu": time.process_time(),
    "programs": stats.compilations_total, "pending": stats.compilations_pending,
    "surprises": stats.compilations_after_warmup,
}), flush=True)
if asked["finish"]:
    llm.finish_warmup()
"""


def main() -> None:
    """Measure and print."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as cache:
        print("| start | Python | import | load | generate | first token | CPU | programs |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        _print("first", [_start(args, cache, finish=True)])
        _print("later", [_start(args, cache, finish=False) for _ in range(args.repeats)])
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\nCPU of all starts together: {children.ru_utime + children.ru_stime:.1f} s")


def _start(args: argparse.Namespace, cache: str, *, finish: bool) -> dict[str, float]:
    asked = {
        "model": args.model,
        "cache": cache,
        "prompt": args.prompt,
        "finish": finish,
        "time": time.time(),
    }
    child = [sys.executable, "-c", CHILD, json.dumps(asked)]
    done = subprocess.run(child, stdout=subprocess.PIPE, check=True, env=os.environ, timeout=3600)
    return json.loads(done.stdout)


def _print(name: str, runs: list[dict[str, float]]) -> None:
    run = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    parts = ("python", "import", "load", "generate", "sum", "cpu")
    seconds = " | ".join(f"{run[part]:.2f} s" for part in parts)
    programs = f"{run['programs']:.0f} + {run['pending']:.0f} pending"
    print(f"| {name} | {seconds} | {programs} |", flush=True)
    assert not run["surprises"], "a program was compiled in a step"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for `jaxinfer serve`; the default model if left out")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
