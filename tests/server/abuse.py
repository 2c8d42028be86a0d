"""`make abuse`: every kind of attack at once, for minutes, on a server process of its own.

Before, during and after it a well-behaved client reads a stream. In the end every page has to be
free, the memory has to be what it was, and that client must hardly have noticed.

    python -m tests.server.abuse [SECONDS] [MODEL]

Without a model the server runs one that recites, 10 ms a step: then what is measured is the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.attacks import ATTACKS, LONG, Client, Target, request

ROOT = Path(__file__).parents[2]
DEFAULT_S = 240.0
QUIET_S = 15.0
MAX_GROWTH = 0.02
MAX_SLOWDOWN = 2.0
STOP_TIMEOUT_S = 60.0
NUM_DRAINED = 20
NUM_ROUNDS = 5
SETTLE_S = 8
MAX_WARM_UPS = 4

RECITING = """
import sys
from jaxinfer.config import EngineConfig
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import serve
from tests.server.fakes import RecitingRunner, make_loaded

class Nothing(dict):  # the runner remembers every request for tests, which here would be a leak
    def __setitem__(self, *_):
        pass

def load(config):
    runner = RecitingRunner()
    runner.requests = Nothing()
    runner.step_s = 0.01
    return make_loaded(runner, max_num_seqs=64, max_model_len=1024, num_pages=2048)

options = ServerOptions(port=0, receive_timeout_s=20, send_timeout_s=20, keep_alive_timeout_s=5,
                        log_level="error")
serve(EngineConfig(), options, load=load)
"""
FLAGS = (
    *("--port", "0", "--receive-timeout-s", "20", "--send-timeout-s", "20"),
    *("--keep-alive-timeout-s", "5", "--log-level", "error"),
)


@dataclass
class Server:
    """A server process.

    Attributes:
        process: It.
        url: Where it listens.
    """

    process: subprocess.Popen[str]
    url: str

    @property
    def target(self) -> Target:
        host, port = self.url.removeprefix("http://").split(":")
        return Target(host=host, port=int(port))

    def anonymous_bytes(self) -> int:
        """Return the memory that is nobody else's: RssAnon and what of it was swapped out."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", text, re.MULTILINE)
        return 1024 * sum(map(int, found))

    def settled_bytes(self) -> int:
        """Return the least of it in a while in which connections end and buffers are freed."""
        samples = []
        for _ in range(SETTLE_S):
            time.sleep(1)
            samples.append(self.anonymous_bytes())
        return min(samples)

    def series(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        families = text_string_to_metric_families(text)
        return {s.name: s.value for f in families for s in f.samples if f.type == "gauge"}

    def num_server_errors(self) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        families = text_string_to_metric_families(text)
        samples = [s for f in families if f.name == "http_requests" for s in f.samples]
        return sum(s.value for s in samples if s.labels.get("status") == "5xx")

    def wait_idle(self) -> bool:
        """Wait until nothing runs; return whether that happened, and every page is free."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            series = self.series()
            if not series["jaxinfer_pages_used"] + series["vllm:num_requests_running"]:
                return True
            time.sleep(0.2)
        return False


@contextlib.contextmanager
def serving(model: str | None) -> Iterator[Server]:
    command = [sys.executable, "-c", RECITING]
    if model is not None:
        command = [sys.executable, "serve.py", "--model", model, *FLAGS]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "is ready at" in line:
                yield Server(process, line.split()[-1].removesuffix("/v1"))
                return
        raise SystemExit("the server did not start")
    finally:
        process.kill()
        process.wait()


def read_streams(url: str, control: Connection) -> None:
    """Read streams, one after the other, until told to stop; send back the gaps, in seconds."""
    gaps: list[float] = []
    with httpx.Client(base_url=url, timeout=120) as http:
        while not control.poll():
            with http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 100}) as stream:
                lines = stream.iter_lines()
                last, text = None, ""
                for line in lines:
                    if not line.startswith("data: "):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last, text = now, line
            if text != "data: [DONE]":
                control.send(f"a stream ended with {text[:200]!r}, status {stream.status_code}")
                return
    control.send(gaps)


@contextlib.contextmanager
def well_behaved(url: str) -> Iterator[list[Any]]:
    """Run such a client in a process of its own; yields a list that it leaves its gaps in."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=read_streams, args=(url, theirs), daemon=True
    )
    process.start()
    found: list[Any] = []
    try:
        yield found
        ours.send("stop")
        found.append(ours.recv() if ours.poll(90) else "the well-behaved client hangs")
    finally:
        process.kill()


async def attack_for(target: Target, seconds: float) -> dict[str, int]:
    """Run all attacks at once, each again and again; return how often each ran."""
    end = time.monotonic() + seconds
    counts = dict.fromkeys((attack.__name__ for attack in ATTACKS), 0)

    async def repeat(attack: Any) -> None:
        while time.monotonic() < end:
            await attack(target)
            counts[attack.__name__] += 1

    async with asyncio.TaskGroup() as group:
        for attack in ATTACKS:
            group.create_task(repeat(attack))
    return counts


def warm_up(server: Server, seconds: float) -> None:
    """Attack until the memory grows no more: caches fill, and the allocator learns its sizes."""
    last = 0
    for _ in range(MAX_WARM_UPS):
        asyncio.run(attack_for(server.target, seconds))
        assert server.wait_idle(), "pages are in use after the warm-up"
        size = server.settled_bytes()
        if last and size <= 1.01 * last:
            return
        last = size


async def terminate_under_load(server: Server) -> list[str]:
    """Send SIGTERM while streams run; return what went wrong."""
    faults: list[str] = []
    started = asyncio.Semaphore(0)

    async def stream() -> None:
        async with Client(server.target) as client:
            await client.send(request({**LONG, "max_tokens": 200}))
            data = await client.receive()
            started.release()
            while b"[DONE]" not in data[-64:]:
                part = await client.receive()
                if not part:
                    break
                data += part
            if b'"finish_reason":"length"' not in data or b"[DONE]" not in data:
                faults.append(f"a running stream was cut at {data[-100:]!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_DRAINED):
            group.create_task(stream())
        for _ in range(NUM_DRAINED):
            await started.acquire()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        async with Client(server.target) as late:
            await late.send(request({"prompt": "Hi"}))
            status = await late.status()
            if status != 503:
                faults.append(f"a request after SIGTERM was answered {status}")
    try:
        code = await asyncio.to_thread(server.process.wait, STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        faults.append(f"the process ended with {code}")
    return faults


def main(seconds: float, model: str | None) -> int:
    """Run it, print what was found, return the exit code."""
    report: list[tuple[bool, str]] = []
    with serving(model) as server:
        say(f"{server.url}; load average {os.getloadavg()[0]:.1f}; warming up")
        warm_up(server, seconds / NUM_ROUNDS)
        errors = server.num_server_errors()
        with well_behaved(server.url) as quiet:
            time.sleep(min(QUIET_S, seconds / 4))
        server.wait_idle()
        balanced, memory = True, [server.settled_bytes()]
        gaps: list[Any] = []
        counts: Counter[str] = Counter()
        for i in range(NUM_ROUNDS):
            say(f"attacking for {seconds / NUM_ROUNDS:.0f} s ({i + 1}/{NUM_ROUNDS})")
            with well_behaved(server.url) as during:
                counts.update(asyncio.run(attack_for(server.target, seconds / NUM_ROUNDS)))
            gaps += during
            balanced &= server.wait_idle()
            memory.append(server.settled_bytes())
        half = len(memory) // 2
        # What the allocator keeps comes and goes; what leaks stays and adds up.
        growth = min(memory[half:]) / min(memory[:half]) - 1
        shown = ", ".join(f"{size / 2**20:.1f}" for size in memory)
        report += [
            (balanced, "every page is free, nothing runs"),
            (growth <= MAX_GROWTH, f"RssAnon {shown} MiB: {growth:+.2%}"),
            (server.num_server_errors() == errors, "no 5xx"),
            compare(quiet, gaps),
        ]
        faults = asyncio.run(terminate_under_load(server))
        report.append((not faults, "; ".join(faults) or "SIGTERM under load: all streams ended"))
    say(f"attacks: {json.dumps(counts)}")
    for passed, text in report:
        say(f"{'ok  ' if passed else 'FAIL'} {text}")
    return 0 if all(passed for passed, _ in report) else 1


def compare(quiet: list[Any], during: list[Any]) -> tuple[bool, str]:
    """Return whether the well-behaved client was served as well as before, and in figures how."""
    for found in (*quiet, *during):
        if isinstance(found, str):
            return False, found
    quiet, during = [*chain(*quiet)], [*chain(*during)]
    a, b = (1e3 * statistics.median(gaps) for gaps in (quiet, during))
    p99 = [1e3 * sorted(gaps)[int(0.99 * len(gaps))] for gaps in (quiet, during)]
    text = (
        f"ITL of a well-behaved client: p50 {a:.1f} ms, attacked {b:.1f} ms ({b / a:.2f} x); "
        f"p99 {p99[0]:.1f} ms, attacked {p99[1]:.1f} ms"
    )
    return b <= MAX_SLOWDOWN * a, text


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    arguments = dict(enumerate(sys.argv[1:]))
    sys.exit(main(float(arguments.get(0, DEFAULT_S)), arguments.get(1)))
