"""Latency and throughput of a server under load, ours or another's, in turn on equal requests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.bench.load import Call, Target, load_server
from jaxinfer.bench.machine import describe_machine
from jaxinfer.bench.workload import Workload, percentile
from jaxinfer.errors import ConfigError

PERCENTS = (50, 90, 99)
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a request must keep to count for goodput; None: anything will do.

    Attributes:
        ttft_ms: Most milliseconds to the first token.
        tpot_ms: Most milliseconds a token after it.
        e2e_ms: Most milliseconds to the last.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, call: Call) -> bool:
        """Whether a request that was answered kept all of it."""
        times = (
            (self.ttft_ms, call.ttft_s),
            (self.tpot_ms, call.tpot_s),
            (self.e2e_ms, call.e2e_s),
        )
        return all(most is None or seconds * 1e3 <= most for most, seconds in times)


def run_serve(
    targets: Mapping[str, Target],
    work: Workload,
    *,
    concurrency: int | None,
    rate: float | None,
    repeats: int,
    objective: Objective,
    text_prompts: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Load each server in turn, `repeats` rounds of it, and return what clients saw.

    A round has prompts and arrivals of its own, the same for every server. Before the first round
    each server answers a few requests that do not count.

    Args:
        targets: Servers by what to call them; the first is compared with the others.
        work: The requests of a round.
        concurrency: See `load_server`.
        rate: See `load_server`.
        repeats: Rounds.
        objective: Of goodput.
        text_prompts: See `load_server`.
        on_progress: Told what is measured next.

    Raises:
        ConfigError: A server does not answer, or answers no request.
    """
    few = Workload(num_requests=4, prompt_tokens=work.prompt_tokens, new_tokens=4, seed=-1)
    for target in targets.values():
        load_server(target, few, text_prompts=text_prompts)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in targets}
    for i in range(repeats):
        for name, target in targets.items():
            on_progress(f"round {i + 1} of {repeats}: {name}")
            again = Workload(**{**work.__dict__, "seed": work.seed + i})
            calls, wall_s = load_server(
                target, again, concurrency=concurrency, rate=rate, text_prompts=text_prompts
            )
            rounds[name].append(summarize(calls, wall_s, objective))
    return {
        "benchmark": "serve",
        "machine": describe_machine(),
        "workload": {
            **work.__dict__,
            "concurrency": concurrency,
            "rate": rate,
            "repeats": repeats,
            "objective": objective.__dict__,
        },
        "servers": [
            {
                "name": name,
                "url": targets[name].root,
                **_median(rounds[name]),
                "rounds": rounds[name],
            }
            for name in targets
        ],
    }


def summarize(calls: Sequence[Call], wall_s: float, objective: Objective) -> dict[str, Any]:
    """Return one round's figures.

    Raises:
        ConfigError: No request was answered; the message has the first reason.
    """
    good = [call for call in calls if call.error is None]
    errors = [call.error for call in calls if call.error is not None]
    if not good:
        raise ConfigError(f"no request was answered: {errors[0]}")
    seconds = {
        "ttft_ms": [call.ttft_s for call in good],
        "itl_ms": [gap for call in good for gap in call.itl_s],
        "tpot_ms": [call.tpot_s for call in good if call.num_tokens > 1],
        "e2e_ms": [call.e2e_s for call in good],
    }
    tokens = sum(call.num_tokens for call in good)
    met = sum(map(objective.met_by, good))
    return {
        "requests": len(calls),
        "failed": len(errors),
        "errors": sorted(set(errors))[:3],
        "wall_s": wall_s,
        "output_tok_s": tokens / wall_s,
        "requests_s": len(good) / wall_s,
        "goodput_requests_s": met / wall_s,
        "goodput_share": met / len(calls),
        "tokens_a_chunk": tokens / sum(len(call.chunks) for call in good),
        **{
            name: {f"p{p}": percentile(values, p) * 1e3 for p in PERCENTS}
            for name, values in seconds.items()
        },
    }


def serve_table(result: dict[str, Any]) -> str:
    """Return the figures as a Markdown table, and the ratios if there is more than one server."""
    work, machine = result["workload"], result["machine"]
    load = f"{work['rate']} requests/s" if work["rate"] else "all at once"
    if work["concurrency"]:
        load += f", at most {work['concurrency']} in flight"
    lines = [
        f"{work['num_requests']} requests of {work['prompt_tokens']} + {work['new_tokens']} tokens "
        f"({work['shared_tokens']} shared), {load}, median of {work['repeats']}; "
        f"{machine['device']}, {machine['cores']} cores, load {machine['load_average']}",
        "",
        "| server | tok/s | goodput | TTFT p50 / p99 | ITL p50 / p99 | TPOT p50 / p99 "
        "| E2E p50 / p99 | failed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for server in result["servers"]:
        times = " | ".join(f"{server[n]['p50']:.0f} / {server[n]['p99']:.0f}" for n in LATENCIES)
        lines.append(
            f"| {server['name']} | {server['output_tok_s']:.0f} "
            f"| {server['goodput_requests_s']:.2f}/s ({server['goodput_share']:.0%}) | {times} "
            f"| {server['failed']} |"
        )
    first, *others = result["servers"]
    for other in others:
        lines.append(
            f"\n{first['name']} / {other['name']}: output "
            f"{first['output_tok_s'] / other['output_tok_s']:.2f} x, TTFT p99 "
            f"{first['ttft_ms']['p99'] / other['ttft_ms']['p99']:.2f} x"
        )
    return "\n".join(lines)


def _median(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each figure's median over the rounds; failures are added up."""
    result: dict[str, Any] = {}
    for name, value in rounds[0].items():
        values = [r[name] for r in rounds]
        if isinstance(value, dict):
            result[name] = {p: statistics.median(v[p] for v in values) for p in value}
        elif isinstance(value, list):
            result[name] = sorted({text for texts in values for text in texts})[:3]
        else:
            result[name] = sum(values) if name == "failed" else statistics.median(values)
    return result
