"""Tokens a second of whole batches, through `LLM`: no server, no network.

Per batch size B, prompts of P tokens and N new tokens, on wall time around `LLM.generate`:

    prefill = B * P / T(1)              T(n): seconds from the prompts to n tokens of each
    decode  = B * N / (T(1 + N) - T(1))

Prompts are random token ids, others at each repeat, and prefixes are not cached: nothing is served
from memory. Decoding is greedy and no end token ends it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.bench.cost import ModelCost
from jaxinfer.bench.machine import describe_machine, describe_settings, measure_ceilings
from jaxinfer.bench.workload import Workload
from jaxinfer.llm import LLM
from jaxinfer.loading import LoadedModel
from jaxinfer.sampling_params import SamplingParams


def run_offline(
    loaded: LoadedModel,
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure and return machine, settings, ceilings and a point for each batch size.

    Args:
        loaded: Without prefix caching and warm-up, and with room for the largest batch.
        batches: Requests at once.
        prompt_tokens: Of each request.
        new_tokens: Of each request.
        repeats: Medians are of so many runs, after one that does not count.
        on_progress: Told what is measured next.
    """
    llm = LLM.from_loaded(loaded)
    on_progress("measuring what the machine can do")
    ceilings = measure_ceilings(llm.config)
    cost = ModelCost.of(loaded.model_config, llm.config)
    vocab_size = loaded.model_config.vocab_size
    points = []
    for batch in batches:
        on_progress(f"batch {batch}")
        firsts, wholes = [], []
        for repeat in range(repeats + 1):
            work = Workload(
                num_requests=batch,
                prompt_tokens=prompt_tokens,
                new_tokens=1 + new_tokens,
                seed=2 * repeat + 1000 * batch,
            )
            firsts.append(_seconds(llm, work, vocab_size, 1))
            # Other prompts: the first of two equal runs must not help the second.
            again = dataclasses.replace(work, seed=work.seed + 1)
            wholes.append(_seconds(llm, again, vocab_size, 1 + new_tokens))
        points.append(
            _point(cost, ceilings, batch, prompt_tokens, new_tokens, firsts[1:], wholes[1:])
        )
    return {
        "benchmark": "offline",
        "machine": describe_machine(),
        "settings": describe_settings(llm.model_name, llm.config),
        "workload": {
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "repeats": repeats,
        },
        "ceilings": ceilings,
        "points": points,
    }


def _seconds(llm: LLM, work: Workload, vocab_size: int, new_tokens: int) -> float:
    """Time a batch; one in which a program was compiled does not count, and is run again."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    prompts = work.prompts(vocab_size)
    while True:
        num_programs = llm.stats.compilations_total
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        # There are few programs, so this ends.
        if llm.stats.compilations_total == num_programs:
            return seconds


def _point(
    cost: ModelCost,
    ceilings: dict[str, float],
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    firsts: list[float],
    wholes: list[float],
) -> dict[str, Any]:
    first = statistics.median(firsts)
    decode = [batch * new_tokens / max(whole - first, 1e-9) for whole in wholes]
    prefill = [batch * prompt_tokens / seconds for seconds in firsts]
    flop_s = batch * cost.prefill_flops(prompt_tokens) / first
    decode_s = statistics.median(wholes) - first
    context = prompt_tokens + new_tokens / 2
    bytes_s = cost.decode_bytes(batch, context) * new_tokens / max(decode_s, 1e-9)
    decode_flop_s = batch * cost.decode_flops(int(context)) * new_tokens / max(decode_s, 1e-9)
    return {
        "batch": batch,
        "first_token_s": spread(firsts),
        "prefill_tok_s": spread(prefill),
        "decode_tok_s": spread(decode),
        "step_ms": decode_s / new_tokens * 1e3,
        "prefill_of_product_rate": flop_s / 1e9 / ceilings["product_gop_s"],
        "decode_of_product_rate": decode_flop_s / 1e9 / ceilings["product_gop_s"],
        "decode_of_read_rate": bytes_s / 1e9 / ceilings["read_gb_s"],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def offline_table(result: dict[str, Any]) -> str:
    """Return the figures as a Markdown table, what they depend on above it."""
    settings, machine, work = result["settings"], result["machine"], result["workload"]
    ceilings = result["ceilings"]
    lines = [
        f"{settings['model']}: {settings['quantization'] or settings['dtype']} weights, "
        f"{settings['dtype']} activations, {settings['kv_cache_dtype']} KV pages, "
        f"{settings['kernels']} kernels, up to {settings['num_decode_steps']} decode steps a "
        f"dispatch, {settings['max_num_batched_tokens']} tokens a step",
        f"{machine['device']}, {machine['cores']} cores, load {machine['load_average']}; Python "
        f"{machine['python']}, jax {machine['jax']}; products {ceilings['product_gop_s']:.0f} "
        f"Gop/s, memory {ceilings['read_gb_s']:.0f} GB/s",
        f"{work['prompt_tokens']} prompt and {work['new_tokens']} new tokens each, median "
        f"(least to most) of {work['repeats']}",
        "",
        "| batch | first token, s | prefill, tok/s | of products | decode, tok/s | of products "
        "| of memory |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for p in result["points"]:
        prefill, decode = p["prefill_tok_s"], p["decode_tok_s"]
        lines.append(
            f"| {p['batch']} | {p['first_token_s']['median']:.3f} "
            f"| {prefill['median']:.0f} ({prefill['min']:.0f} to {prefill['max']:.0f}) "
            f"| {p['prefill_of_product_rate']:.0%} "
            f"| {decode['median']:.0f} ({decode['min']:.0f} to {decode['max']:.0f}) "
            f"| {p['decode_of_product_rate']:.0%} | {p['decode_of_read_rate']:.0%} |"
        )
    return "\n".join(lines)
