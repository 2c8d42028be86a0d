"""Decode tokens/s per batch size and prefill tokens/s of one model, through the Python API.

    .venv/bin/python benchmarks/throughput.py [--model PATH]

Prints the table of the README together with what belongs beside its figures. Decode counts the
tokens after each request's first; all requests of a batch start in one step and end together.
Prefill is one prompt alone, from arrival to first token. Prompts are random token ids and the
prefix cache is off, so nothing is served from memory. The median of the repeats is shown.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
from pathlib import Path

import jax

from jaxinfer import LLM, EngineConfig, RequestOutput, SamplingParams


def main() -> None:
    """Measure and print."""
    args = _arguments()
    llm = LLM(
        args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        kernels=args.kernels,
        max_num_seqs=max(args.batch),
        max_model_len=max(args.prefill_len + 1, args.prompt_len + args.new_tokens),
        enable_prefix_caching=False,
    )
    llm.finish_warmup()
    rng = random.Random(0)
    print(_conditions(llm, args))
    print()
    print("| what | batch | tokens/s |")
    print("| --- | ---: | ---: |")
    for batch in args.batch:
        rates = [_decode_rate(llm, rng, batch, args) for _ in range(args.repeats + 1)]
        print(f"| decode | {batch} | {statistics.median(rates[1:]):.1f} |", flush=True)
    rates = [_prefill_rate(llm, rng, args.prefill_len) for _ in range(args.repeats + 1)]
    print(f"| prefill | 1 | {statistics.median(rates[1:]):.0f} |")


def _decode_rate(llm: LLM, rng: random.Random, batch: int, args: argparse.Namespace) -> float:
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    outputs = _run(llm, [_prompt(rng, args.prompt_len) for _ in range(batch)], params)
    first = max(output.metrics.first_token_time for output in outputs)
    last = max(output.metrics.last_token_time for output in outputs)
    return batch * (args.new_tokens - 1) / (last - first)


def _prefill_rate(llm: LLM, rng: random.Random, prompt_len: int) -> float:
    (output,) = _run(llm, [_prompt(rng, prompt_len)], SamplingParams(temperature=0, max_tokens=1))
    return prompt_len / (output.metrics.first_token_time - output.metrics.arrival_time)


def _run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 10_000) for _ in range(length)]


def _conditions(llm: LLM, args: argparse.Namespace) -> str:
    """Return hardware, versions and sizes: without them the figures mean nothing."""
    config: EngineConfig = llm.config
    device = jax.devices()[0]
    hardware = device.device_kind
    if device.platform == "cpu":
        hardware = f"{_cpu_name()}, {os.cpu_count()} cores"
    return (
        f"{llm.model_name}, {config.quantization or config.dtype} weights, {config.dtype} "
        f"activations, {config.kernels} kernels, on {hardware}; "
        f"Python {platform.python_version()}, jax {jax.__version__}; "
        f"decode: prompts of {args.prompt_len} tokens, {args.new_tokens} new tokens each; "
        f"prefill: {args.prefill_len} tokens in chunks of {config.max_num_batched_tokens}; "
        f"median of {args.repeats}"
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for `jaxinfer serve`; the default model if left out")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefill-len", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
