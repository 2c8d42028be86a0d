"""One model on two processes of four devices each: the tokens of one process, or an error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hosts.server import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
HOST_TIMEOUT_S = 5.0
NUM_REQUESTS = 32


class Process:
    """A server process, and what it said."""

    def __init__(self, folder: Path, **settings: Any):
        settings["compilation_cache_dir"] = str(folder.parent / "programs")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.server", str(folder), json.dumps(settings)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        self.text = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.text += line
                    self._changed.notify_all()

    def wait_for(self, words: str) -> str:
        """Return what was said once the words were."""
        with self._changed:
            assert self._changed.wait_for(lambda: words in self.text, TIMEOUT_S), self.text
            return self.text

    @property
    def url(self) -> str:
        text = self.wait_for("is ready at")
        return text.split("is ready at ")[1].split("/v1")[0]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hosts") / "model"
    make_model(path)
    return path


@contextmanager
def pair(folder: Path, **settings: Any) -> Iterator[tuple[Process, Process]]:
    """Two processes that hold the model together."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {
        "num_hosts": 2,
        "coordinator_address": f"127.0.0.1:{port}",
        "host_timeout_s": HOST_TIMEOUT_S,
        **settings,
    }
    processes = [Process(folder, **common, host_rank=rank) for rank in range(2)]
    try:
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.end()


def body(i: int) -> dict[str, Any]:
    """Greedy and drawn requests, one of them with log-probabilities, of several lengths."""
    prompt = [3 + (11 * i + 5 * j) % 300 for j in range(2 + i % 7)]
    sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
    more = {"logprobs": 2, "echo": True} if i == 5 else {}
    fixed = {"max_tokens": 4 + i % 3, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, **sampling, **more, **fixed}


async def ask_all(url: str) -> list[list[int]]:
    """Return the tokens of all requests, asked at once."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:

        async def ask(i: int) -> list[int]:
            answer = await client.post("/v1/completions", json=body(i))
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["token_ids"]

        return list(await asyncio.gather(*(ask(i) for i in range(NUM_REQUESTS))))


def assert_dead(url: str, since: float) -> None:
    """Assert that the server says so, and serves nobody any more."""
    while httpx.get(f"{url}/health", timeout=TIMEOUT_S).json()["status"] != "dead":
        assert time.monotonic() - since < 30
        threading.Event().wait(0.1)
    answer = httpx.post(f"{url}/v1/completions", json=body(1), timeout=TIMEOUT_S)
    assert answer.status_code == 503 and "host" in answer.json()["error"]["message"]


def test_two_hosts_serve_like_one_and_never_go_on_alone(folder: Path) -> None:
    alone = Process(folder)
    try:
        expected = asyncio.run(ask_all(alone.url))
    finally:
        alone.end()
    assert len(set(map(tuple, expected))) > NUM_REQUESTS // 2

    with pair(folder) as (leader, follower):
        url = leader.url
        assert asyncio.run(ask_all(url)) == expected
        # A host hangs, and nobody asks for anything.
        stopped_at = time.monotonic()
        follower.process.send_signal(signal.SIGSTOP)
        assert_dead(url, stopped_at)
        leader.wait_for("hangs: no answer for 5 s")
        leader.process.kill()
        follower.process.send_signal(signal.SIGCONT)
        assert follower.process.wait(30) != 0, follower.text
        follower.wait_for("host 0 has ended")

    # Started again, it works. Then a host dies in the middle of a stream: tokens so far are right.
    with pair(folder) as (leader, follower):
        url = leader.url
        assert asyncio.run(ask_all(url)) == expected
        tokens, last, killed_at = stream_and_kill(url, follower)
        assert '"error"' in last and '"code": 503' in last and "host" in last
        assert 2 <= len(tokens) < 80
        assert tokens[: len(expected[1])] == expected[1][: len(tokens)]
        assert_dead(url, killed_at)
        leader.wait_for("has ended; start all hosts again")
        leader.process.send_signal(signal.SIGTERM)
        assert leader.process.wait(30) != 0


def stream_and_kill(url: str, victim: Process) -> tuple[list[int], str, float]:
    """Return the tokens of a stream, its last event, and when a host was killed behind it."""
    asked = {**body(1), "max_tokens": 80, "stream": True}
    tokens: list[int] = []
    last, killed_at = "", 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=TIMEOUT_S) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            last = line
            if '"choices"' in line:
                tokens += json.loads(line[6:])["choices"][0]["token_ids"] or []
            if len(tokens) >= 2 and not killed_at:
                killed_at = time.monotonic()
                victim.process.kill()
    return tokens, last, killed_at


def test_hosts_end_when_host_0_has_drained_and_not_before(folder: Path) -> None:
    with pair(folder, warmup=False) as (leader, follower):
        assert leader.url
        follower.process.send_signal(signal.SIGTERM)
        follower.wait_for("waiting for host 0 to end")
        assert httpx.get(f"{leader.url}/health", timeout=TIMEOUT_S).status_code == 200
        leader.process.send_signal(signal.SIGTERM)
        assert leader.process.wait(30) == 0, leader.text
        assert follower.process.wait(30) == 0, follower.text
