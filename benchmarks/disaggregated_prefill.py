"""When would prefill on devices of its own pay? A simulation; no device and no model is needed.

    python benchmarks/disaggregated_prefill.py

Four devices serve requests that come at random. *Together*: each is a replica that computes a
chunk of prompts beside its decoding rows in every step, as the engine does. *Apart*: some compute
prompts only and send keys and values to the others, which decode only. The table has the highest
rate, requests a second, at which 90 % of the requests meet both limits: time to first token, and
mean time between tokens. The best chunk and the best split are taken for each.

A step costs what its largest part costs: reading weights and the keys of all rows, or computing all
tokens. Numbers of the defaults: 8B parameters in bfloat16, 32 layers of 8 KV heads of 128, an H100
(3.35 TB/s, 600 TFLOP/s sustained), 50 GB/s between devices. Room for keys and values is unlimited.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WEIGHT_READ_S = 16e9 / 3.35e12
TOKEN_COMPUTE_S = 2 * 8e9 / 600e12
KV_BYTES = 2 * 32 * 8 * 128 * 2
KV_READ_S = KV_BYTES / 3.35e12
PAIR_COMPUTE_S = 4 * 32 * 32 * 128 / 600e12
STEP_OVERHEAD_S = 0.001
CHUNKS = (128, 256, 512, 2048)
PROMPTS_AT_ONCE = 4096
ATTAINMENT = 0.9
DURATION_S = 12.0


@dataclass
class Request:
    """One request and how it went."""

    arrival: float
    prompt: int
    output: int
    computed: int = 0
    made: int = 0
    first: float = field(default=float("inf"))
    last: float = field(default=float("inf"))

    def meets(self, ttft_s: float, tpot_s: float) -> bool:
        tpot = (self.last - self.first) / max(self.output - 1, 1)
        return self.first - self.arrival <= ttft_s and tpot <= tpot_s


def step_s(num_tokens: int, num_keys: int, num_pairs: float) -> float:
    """How long a step takes.

    Args:
        num_tokens: Computed in it, of prompts and outputs.
        num_keys: Read.
        num_pairs: Of a token and a key that it attends to.
    """
    read = WEIGHT_READ_S + KV_READ_S * num_keys
    return STEP_OVERHEAD_S + max(read, TOKEN_COMPUTE_S * num_tokens + PAIR_COMPUTE_S * num_pairs)


def serve(arrivals: Sequence[tuple[float, Request]], chunk: int) -> None:
    """Run one device: `chunk` tokens a step, decoding rows first, then prompts in order.

    A request that comes with its first token made decodes only.
    """
    coming = deque(sorted(arrivals, key=lambda a: a[0]))
    prefilling: deque[Request] = deque()
    rows: list[Request] = []
    now, num_keys = 0.0, 0
    while coming or prefilling or rows:
        if not prefilling and not rows:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, request = coming.popleft()
            if request.made:
                rows.append(request)
                num_keys += request.prompt
            else:
                prefilling.append(request)
        budget = chunk - len(rows)
        ends: list[Request] = []
        num_tokens, num_read, num_pairs = len(rows), num_keys, float(num_keys)
        while prefilling and budget > 0:
            request = prefilling[0]
            n = min(budget, request.prompt - request.computed)
            num_tokens += n
            num_read += request.computed
            num_pairs += n * (request.computed + n / 2)
            request.computed += n
            budget -= n
            if request.computed < request.prompt:
                break
            ends.append(prefilling.popleft())
        now += step_s(num_tokens, num_read, num_pairs)
        num_keys += len(rows)
        for request in ends:
            request.first = now
            num_keys += request.prompt
        rows += ends
        done = False
        for request in rows:
            request.made += 1
            request.last = now
            done |= request.made >= request.output
        if done:
            num_keys -= sum(r.prompt + r.made - 1 for r in rows if r.made >= r.output)
            rows = [r for r in rows if r.made < r.output]


def together(requests: Sequence[Request], num_devices: int, chunk: int) -> None:
    """Spread the requests over replicas in turn."""
    for device in range(num_devices):
        serve([(r.arrival, r) for r in requests[device::num_devices]], chunk)


def apart(
    requests: Sequence[Request], num_devices: int, num_prefill: int, link_bytes_s: float
) -> None:
    """Compute prompts on some devices, whoever is free first, and decode on the others."""
    free = [0.0] * num_prefill
    handed: list[tuple[float, Request]] = []
    for r in requests:
        start = max(heapq.heappop(free), r.arrival)
        r.first = r.last = start + step_s(r.prompt, 0, r.prompt**2 / 2)
        r.computed, r.made = r.prompt, 1
        heapq.heappush(free, r.first)
        if r.output > 1:
            handed.append((r.first + r.prompt * KV_BYTES / link_bytes_s, r))
    num_decode = num_devices - num_prefill
    handed.sort(key=lambda h: h[0])
    for device in range(num_decode):
        serve(handed[device::num_decode], PROMPTS_AT_ONCE)


def best_rate(
    run: Callable[[list[Request]], None], prompt: int, output: int, limits: tuple[float, float]
) -> float:
    """Return the highest rate at which enough requests meet the limits, to 5 %."""

    def holds(rate: float) -> bool:
        rng = random.Random(0)
        now, requests = 0.0, []
        # Long enough for a queue that grows to show.
        while now < DURATION_S or len(requests) < 100:
            now += rng.expovariate(rate)
            scale = rng.uniform(0.5, 1.5)
            requests.append(Request(now, int(prompt * scale), max(2, int(output * scale))))
        run(requests)
        return sum(r.meets(*limits) for r in requests) >= ATTAINMENT * len(requests)

    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    while high - low > 0.05 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--link-gb-s", type=float, default=50.0)
    args = parser.parse_args()
    print("| prompt + output | limits: first token, between | together (chunk) | apart (split) | |")
    print("| --- | --- | --- | --- | --- |")
    for prompt, output in ((256, 256), (1024, 256), (4096, 256), (8192, 64)):
        for limits in ((1.0, 0.03), (1.0, 0.012), (0.5, 0.008)):
            ours = {
                chunk: best_rate(
                    lambda rs, chunk=chunk: together(rs, args.devices, chunk),
                    prompt,
                    output,
                    limits,
                )
                for chunk in CHUNKS
            }
            theirs = {
                n: best_rate(
                    lambda rs, n=n: apart(rs, args.devices, n, args.link_gb_s * 1e9),
                    prompt,
                    output,
                    limits,
                )
                for n in range(1, args.devices)
            }
            chunk, split = max(ours, key=ours.__getitem__), max(theirs, key=theirs.__getitem__)
            gain = theirs[split] / ours[chunk] if ours[chunk] else float("inf")
            print(
                f"| {prompt} + {output} | {limits[0]:g} s, {1e3 * limits[1]:g} ms "
                f"| {ours[chunk]:.1f} ({chunk}) "
                f"| {theirs[split]:.1f} ({split} + {args.devices - split}) | × {gain:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
