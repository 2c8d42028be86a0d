"""Clients that leave, engines that die: nothing leaks, and each stream has an end."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from jaxinfer.server.streaming import until_disconnect
from tests.server.fakes import NAME
from tests.server.serving import TIMEOUT_S, RunningServer, running_server, wait_until

pytestmark = pytest.mark.timeout(60)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {COMPLETIONS: {"prompt": "Hi"}, CHAT: {"messages": MESSAGES}}
LONG = {"ignore_eos": True, "max_tokens": 8000, "temperature": 0}


@pytest.fixture(scope="module")
def slow_server():
    """A server whose answers take seconds."""
    with running_server() as server:
        server.runner.step_s = 0.001
        server.load(max_model_len=8192, num_pages=20_000, max_num_seqs=64)
        yield server


def send(server: RunningServer, path: str, body: dict) -> socket.socket:
    """Send a request, answer unread."""
    port = int(server.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


def num_aborted(server: RunningServer) -> int:
    return server.engine.stats.finished.get("abort", 0)


def test_a_hundred_clients_that_leave_mid_stream_leave_nothing_behind(slow_server):
    before = num_aborted(slow_server)

    def leave(path: str, body: dict) -> None:
        connection = send(slow_server, path, {**LONG, **body, "stream": True})
        received = b""
        while received.count(b"data: ") < 3:
            new = connection.recv(65536)
            assert new, received
            received += new
        connection.close()

    def leave_many(path: str, body: dict) -> None:
        for _ in range(25):
            leave(path, body)

    with ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(leave_many, *args)
            for args in (
                (COMPLETIONS, {"prompt": "Hi"}),
                (COMPLETIONS, {"prompt": ["a", "b"]}),
                (CHAT, {"messages": MESSAGES}),
                (CHAT, {"messages": MESSAGES, "n": 2, "temperature": 1}),
            )
        ]
    for future in futures:
        future.result(TIMEOUT_S)
    slow_server.assert_idle()
    # Two of the four kinds run two sequences each.
    assert num_aborted(slow_server) - before == 25 * (1 + 2 + 1 + 2)
    slow_server.assert_works()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_clients_that_leave_before_a_whole_answer_abort_it(slow_server, path):
    before = num_aborted(slow_server)
    body = BODIES[path]
    connections = [send(slow_server, path, {**body, **LONG}) for _ in range(5)]
    wait_until(lambda: slow_server.engine.stats.num_requests_running == 5)
    for connection in connections:
        connection.close()
    slow_server.assert_idle()
    assert num_aborted(slow_server) - before == 5


def test_client_that_leaves_is_noticed_within_steps(slow_server):
    connection = send(slow_server, COMPLETIONS, {"prompt": "Hi", **LONG})
    wait_until(lambda: slow_server.engine.stats.num_requests_running == 1)
    steps = slow_server.engine.stats.num_steps
    connection.close()
    slow_server.assert_idle()
    # A step takes a millisecond here; the rest is the event loop's and this thread's polling.
    assert slow_server.engine.stats.num_steps - steps < 200


def test_closing_the_clients_stream_aborts_it(slow_server):
    before = num_aborted(slow_server)
    with slow_server.client.completions.create(
        model=NAME,
        prompt="Hi",
        stream=True,
        max_tokens=8000,
        temperature=0,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
    slow_server.assert_idle()
    assert num_aborted(slow_server) - before == 1


def test_slow_reader_gets_everything_and_holds_up_nobody(slow_server):
    body = {"prompt": "Hi", **LONG, "max_tokens": 500, "stream": True}
    connection = send(slow_server, COMPLETIONS, body)
    slow_server.assert_works()
    wait_until(lambda: slow_server.engine.stats.num_requests_running == 0)
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(1000)
    connection.close()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_engine_that_dies_mid_stream_ends_it_with_an_error_event(own_server, path):
    own_server.runner.step_s = 0.001
    own_server.load(max_model_len=8192)
    body = BODIES[path]
    request = {**body, **LONG, "stream": True}
    with own_server.http.stream("POST", path, json=request) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        own_server.runner.error = RuntimeError("device lost at /secret/path.py")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["code"] == 503 and "secret" not in error["message"]
    assert "RuntimeError" not in error["message"]
    health = own_server.http.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "dead"
    after = own_server.post(COMPLETIONS, {"prompt": "Hi"})
    assert after.status_code == 503 and "secret" not in after.text
    assert own_server.http.get("/metrics").status_code == 200


def test_client_raises_on_an_error_event(own_server):
    own_server.runner.step_s = 0.001
    own_server.load(max_model_len=8192)
    stream = own_server.client.completions.create(
        model=NAME,
        prompt="Hi",
        stream=True,
        max_tokens=8000,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    parts = iter(stream)
    next(parts)
    own_server.runner.error = RuntimeError("device lost")
    with pytest.raises(openai.APIError):
        list(parts)


def test_engine_that_dies_before_the_first_token_is_a_clean_503(own_server):
    own_server.load()
    own_server.runner.error = RuntimeError("device lost at /secret/path.py")
    for stream in (False, True):
        response = own_server.post(COMPLETIONS, {"prompt": "Hi", "stream": stream})
        assert response.status_code == 503 and "secret" not in response.text
        assert response.json()["error"]["type"] == "ServiceUnavailableError"


def test_each_event_is_one_write(server):
    """A chunk of the transfer encoding is what the server wrote at once."""
    connection = send(server, COMPLETIONS, {"prompt": "Hi", "temperature": 0, "stream": True})
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n"):
        received += connection.recv(65536)
    connection.close()
    rest = received.split(b"\r\n\r\n", 1)[1]
    events = []
    while True:
        size, rest = rest.split(b"\r\n", 1)
        length = int(size, 16)
        if length == 0:
            break
        events.append(rest[:length])
        rest = rest[length + 2 :]
    assert events[-1] == b"data: [DONE]\n\n"
    for event in events:
        assert event.startswith(b"data: ") and event.endswith(b"\n\n")
        assert event.count(b"\n\n") == 1
        event.decode()


def test_work_is_cancelled_and_cleaned_up_when_the_client_leaves():
    async def run() -> list[str]:
        log = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                log.append("cleaned up")

        async def receive() -> dict:
            return {"type": "http.disconnect"}

        try:
            await until_disconnect(receive, work())
        except Exception as error:
            log.append(type(error).__name__)
        return log

    assert asyncio.run(run()) == ["cleaned up", "ClientDisconnect"]
