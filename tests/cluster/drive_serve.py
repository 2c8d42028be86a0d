"""Run by `test_serve` in a process of its own: two replicas on Ray, and what clients see."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from jaxinfer.cluster.application import build
from jaxinfer.cluster.settings import ClusterSettings
from tests.cluster.loading import Reciting

PORT = 18_733
TIMEOUT_S = 60.0
NUM_REQUESTS, WIDTH, KILL_AFTER = 200, 40, 60
NUM_PREFIXES, PREFIX_CHARS = 16, 384


def start(
    settings: dict[str, Any], folder: Path, step_s: float, num_replicas: tuple[int, int] = (2, 2)
) -> None:
    least, most = num_replicas
    args = ClusterSettings(min_replicas=least, max_replicas=most, num_cpus=0.25, **settings)
    serve.run(build(args, Reciting(folder, step_s)), name="jaxinfer")


async def ask_all(
    bodies: list[dict[str, Any]], on_answer: Callable[[int], None] = lambda done: None
) -> list[httpx.Response]:
    """Return the answers to all requests, `WIDTH` of them asked at once."""
    answers: list[Any] = [None] * len(bodies)
    numbers = iter(range(len(bodies)))
    done = 0
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=TIMEOUT_S) as client:

        async def work() -> None:
            nonlocal done
            for i in numbers:
                answers[i] = await client.post("/v1/completions", json=bodies[i])
                done += 1
                on_answer(done)

        await asyncio.gather(*(work() for _ in range(WIDTH)))
    return answers


def kill_one(folder: Path) -> dict[str, Any]:
    """Two replicas, 200 requests, one replica killed in the middle."""
    start({}, folder, 0.02)
    pids = sorted(int(path.name) for path in folder.iterdir())
    # Bodies that share nothing, so that both replicas have work.
    bodies = [
        {"prompt": f"{i:04d}" * 16, "max_tokens": 12, "ignore_eos": True}
        for i in range(NUM_REQUESTS)
    ]

    def kill(done: int) -> None:
        if done == KILL_AFTER:
            os.kill(pids[0], signal.SIGKILL)

    answers = asyncio.run(ask_all(bodies, kill))
    failed = [answer for answer in answers if answer.status_code != 200]
    texts = {answer.json()["choices"][0]["text"] for answer in answers if answer not in failed}
    again = asyncio.run(ask_all([b for b, a in zip(bodies, answers, strict=True) if a in failed]))
    return {
        "replicas": len(pids),
        "failed": [
            [a.status_code, a.headers.get("retry-after"), a.json()["error"]["message"]]
            for a in failed
        ],
        "texts": sorted(texts),
        "again": [answer.status_code for answer in again],
    }


def stream_and_pages() -> dict[str, Any]:
    """What else goes through the front."""
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=TIMEOUT_S) as client:
        body = {"prompt": "Hi", "max_tokens": 4, "temperature": 0}
        streamed = client.post("/v1/completions", json={**body, "stream": True})
        bad = client.post("/v1/completions", json={**body, "max_tokens": -1})
        return {
            "models": client.get("/v1/models").json()["data"][0]["id"],
            "kind": streamed.headers["content-type"],
            "end": streamed.text.strip().splitlines()[-1],
            "bad": [bad.status_code, bad.json()["error"]["param"]],
            "request_id": streamed.headers.get("x-request-id"),
        }


def hits(router: str, folder: Path) -> float:
    """Return the share of prompt tokens found in a cache, when 16 prefixes are shared."""
    # Each replica's pages hold half of the prefixes, and what runs.
    start({"router": router, "engine": {"num_pages": 280, "max_num_seqs": 4}}, folder, 0.001)
    rng = random.Random(0)
    prefixes = ["".join(rng.choices("abcdefgh ", k=PREFIX_CHARS)) for _ in range(NUM_PREFIXES)]
    bodies = [
        {"prompt": f"{rng.choice(prefixes)}{i:08d}", "max_tokens": 2} for i in range(NUM_REQUESTS)
    ]
    answers = asyncio.run(ask_all(bodies))
    usages = [answer.json()["usage"] for answer in answers]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return cached / sum(usage["prompt_tokens"] for usage in usages)


def grow_and_roll(folder: Path) -> dict[str, Any]:
    """One replica becomes two under load; then both are replaced while requests come."""
    for path in folder.iterdir():
        path.unlink()
    settings = {"upscale_delay_s": 1, "target_ongoing_requests": 4, "drain_timeout_s": 20}
    start(settings, folder, 0.02, num_replicas=(1, 2))
    before = len(list(folder.iterdir()))
    rest = {"max_tokens": 12, "ignore_eos": True}
    bodies = [{"prompt": f"{i:04d}" * 16, **rest} for i in range(100)]
    statuses: list[int] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        statuses += [answer.status_code for answer in asyncio.run(ask_all(bodies))]
    grown = len(list(folder.iterdir()))
    rolled = threading.Thread(
        target=start,
        args=({**settings, "engine": {"max_num_seqs": 16}}, folder, 0.02),
        kwargs={"num_replicas": (2, 2)},
    )
    rolled.start()
    while rolled.is_alive():
        statuses += [answer.status_code for answer in asyncio.run(ask_all(bodies))]
    statuses += [answer.status_code for answer in asyncio.run(ask_all(bodies))]
    after = len(list(folder.iterdir()))
    return {"before": before, "grown": grown, "after": after, "statuses": sorted(set(statuses))}


def main() -> None:
    """Print a report."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    report: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            report["killed"] = kill_one(Path(folder))
            report["pages"] = stream_and_pages()
            for router in ("prefix", "round-robin"):
                serve.delete("jaxinfer")
                report[router] = hits(router, Path(folder))
            serve.delete("jaxinfer")
            report["scaled"] = grow_and_roll(Path(folder))
    finally:
        serve.shutdown()
        ray.shutdown()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
