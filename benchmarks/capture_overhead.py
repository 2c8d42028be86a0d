"""What capturing costs, so measured that a busy machine disturbs both sides alike.

    python benchmarks/capture_overhead.py                       # the default model
    python benchmarks/capture_overhead.py MODEL --dtype bfloat16 --what logits

One batch is run in which every second position is captured: a step that captures and a step that
does not, which is the program of an engine without hooks, take turns in one process, on the same
pages and rows. Each captured step is divided by the mean of its two neighbours; what is printed is
the median of these ratios, with a bootstrap interval of 95 %. Steps are not overlapped, so that
each has its own time: overlapped, some of the cost would be hidden.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np

from jaxinfer import LLM
from jaxinfer.hooks import Hooks
from jaxinfer.sampling_params import SamplingParams

CHUNK = 128  # tokens of a step that computes a prompt


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--what", help="Names to capture; a layer's residual stream if left out.")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--chunks", type=int, default=30)
    arguments = parser.parse_args()
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        kernels=arguments.kernels,
        max_model_len=max(arguments.steps + 64, CHUNK * arguments.chunks + 16),
        max_num_seqs=max(arguments.rows),
        max_num_batched_tokens=CHUNK,
        num_decode_steps=1,
        overlap=False,
        enable_prefix_caching=False,
        warmup=False,
    ) as llm:
        layers = [name for name in llm.hook_points if name.endswith("resid_post")]
        name = arguments.what or layers[len(layers) // 2]
        print(f"{arguments.dtype}, capturing {name}")
        print("| step | ms | captured / not | 95 % | pairs |\n| --- | ---: | ---: | ---: | ---: |")
        for rows in arguments.rows:
            seconds = _decode(llm, name, rows, arguments.steps)
            _show(f"decode, {rows} rows", seconds)
        seconds = _prefill(llm, name, arguments.chunks)
        _show(f"prompt, {CHUNK} tokens", seconds)


def _decode(llm: LLM, name: str, rows: int, steps: int) -> np.ndarray:
    """Return the seconds of steps that decode; the odd ones capture."""
    first = 8  # behind a prompt of 8 tokens, whose step samples the first
    hooks = Hooks(capture=(name,), positions=range(first + 1, first + steps, 2))
    prompts = [[row + 10] * 8 for row in range(rows)]
    for count in (6, steps):  # compiles first
        params = SamplingParams(temperature=0.0, max_tokens=count + 1, ignore_eos=True)
        seconds = _run(llm, prompts, params, hooks)
    return seconds[-steps:]


def _prefill(llm: LLM, name: str, chunks: int) -> np.ndarray:
    """Return the seconds of a long prompt's steps; the odd ones capture all of their tokens."""
    length = CHUNK * chunks
    odd = [p for p in range(length) if p // CHUNK % 2]
    hooks = Hooks(capture=(name,), positions=odd)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    ids = [100 + i % 1000 for i in range(length)]
    _run(llm, [ids[: 3 * CHUNK]], params, hooks)
    return _run(llm, [ids], params, hooks)[:chunks]


def _run(llm: LLM, prompts: list[list[int]], params: SamplingParams, hooks: Hooks) -> np.ndarray:
    """Return the seconds of each step."""
    engine = llm.engine
    for row, ids in enumerate(prompts):
        engine.add_request(f"r{row}", ids, params, hooks=hooks)
    seconds = []
    while engine.has_unfinished():
        start = time.perf_counter()
        engine.step()
        # A chunk of a prompt has no token to wait for.
        jax.block_until_ready(jax.live_arrays())
        seconds.append(time.perf_counter() - start)
    return np.array(seconds)


def _show(what: str, seconds: np.ndarray) -> None:
    captured = np.arange(1, len(seconds) - 1, 2)
    around = (seconds[captured - 1] + seconds[captured + 1]) / 2
    ratios = seconds[captured] / around
    rng = np.random.default_rng(0)
    resampled = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    ms = 1e3 * np.median(around)
    print(
        f"| {what} | {ms:.2f} | {np.median(ratios):.3f} | {low:.3f} - {high:.3f} | {len(ratios)} |"
    )


if __name__ == "__main__":
    main()
