"""What looking inside costs, and what determinism costs: one command, one table.

    python benchmarks/research.py                 # the default model
    python benchmarks/research.py MODEL --rows 8 --steps 24

Times of one decode step, median, rows in lockstep behind short prompts; a step with hooks runs a
program of its own, one without runs the very program of an engine without hooks, which
`tests/research/test_capture.py` checks.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from jaxinfer import LLM, edits
from jaxinfer.edits import Edit, resolve
from jaxinfer.hooks import Hooks
from jaxinfer.sampling_params import SamplingParams


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    rows, steps = arguments.rows, arguments.steps
    settings = {
        "max_model_len": 256,
        "max_num_seqs": 32,
        "warmup": False,
        "num_decode_steps": 1,
        "enable_prefix_caching": False,
    }
    print(f"| step of {rows} rows | ms | times |\n| --- | ---: | ---: |")
    with LLM(arguments.model, max_num_batched_tokens=256, **settings) as llm:
        names = [name for name in llm.hook_points if name.endswith("resid_post")]
        size = llm.hook_points["embed"][0]
        middle = names[len(names) // 2]
        vector = np.full(size, 1e-3, np.float32)
        cases: dict[str, tuple[tuple[str, ...], tuple[Edit, ...]]] = {
            "no hooks": ((), ()),
            "capture one resid_post": ((middle,), ()),
            "capture every resid_post": (tuple(names), ()),
            "capture attention weights of one layer": (("layers.0.attn_weights",), ()),
            "steer one layer": ((), (edits.add(middle, vector),)),
        }
        base = _measure_all(llm, cases, rows, steps, arguments.rounds)
    with LLM(arguments.model, deterministic=True, **settings) as llm:
        case = {"deterministic=True": cases["no hooks"]}
        more = _measure_all(llm, case, rows, steps, arguments.rounds)
    reference = base["no hooks"]
    for name, seconds in {**base, **more}.items():
        print(f"| {name} | {1e3 * seconds:.2f} | {seconds / reference:.2f} |")


def _measure_all(
    llm: LLM,
    cases: dict[str, tuple[tuple[str, ...], tuple[Edit, ...]]],
    rows: int,
    steps: int,
    rounds: int,
) -> dict[str, float]:
    """Median step in seconds; by turns, so that a busy machine is so for all."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for name, case in cases.items():
        _run(llm, case, rows, 3)  # compiles
        times[name].clear()
    for i in range(rounds):
        # Back and forth: who comes first after a pause is slower.
        order = list(cases.items())[:: 1 if i % 2 else -1]
        for name, case in order:
            times[name] += _run(llm, case, rows, steps)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _run(
    llm: LLM, case: tuple[tuple[str, ...], tuple[Edit, ...]], rows: int, steps: int
) -> list[float]:
    """Run equal requests side by side and return the seconds of each step that only decodes."""
    capture, asked = case
    engine = llm.engine
    hooks = None
    if capture or asked:
        hooks = Hooks(capture=capture, edits=resolve(asked, engine.hook_points, 8))
    params = SamplingParams(temperature=0.0, max_tokens=steps + 3, ignore_eos=True)
    for row in range(rows):
        engine.add_request(f"r{row}", [row + 10] * 8, params, hooks=hooks)
    seconds = []
    while engine.has_unfinished():
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds[3:-2]


if __name__ == "__main__":
    main()
