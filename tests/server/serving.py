"""A real uvicorn on loopback in a thread, and what tests ask of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.server.listener import listen, url_of
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import Server, make_server
from jaxinfer.server.state import ServerState
from tests.server.fakes import NAME, RecitingRunner, make_loaded

TIMEOUT_S = 20.0


class RunningServer:
    """A server under test.

    Attributes:
        url: Where it listens, without a path.
        state: Its state; `state.serve` makes it ready.
        runner: Its model.
        loaded: The model as loaded, None before `load`.
    """

    def __init__(self, url: str, state: ServerState, server: Server):
        self.url, self.state, self.server = url, state, server
        self.runner = RecitingRunner()
        self.loaded: Any = None
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
        )

    def load(self, **settings: Any) -> None:
        self.loaded = make_loaded(self.runner, **settings)
        self.state.serve(self.loaded)

    @property
    def engine(self) -> Any:
        return self.loaded.engine

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
        )

    def post(self, path: str, body: Any) -> httpx.Response:
        """Send any JSON that Python can spell, or raw bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self.http.post(path, content=content, headers=headers)

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """Return the data of each event of a stream."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.text.split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return [block.removeprefix("data: ") for block in blocks]

    def series(self) -> dict[str, float]:
        """Return `/metrics`, each sample under its name and the values of its own labels."""
        text = self.http.get("/metrics").text
        result = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                own = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
                result["/".join([sample.name, *own])] = sample.value
        return result

    def assert_idle(self) -> None:
        """Wait until nothing runs; assert that every page is free or cached."""
        wait_until(lambda: self.state.engine.num_live_requests == 0)
        wait_until(lambda: not self.engine.has_unfinished())
        assert self.engine.stats.num_pages_used == 0
        self.engine.check_integrity()

    def assert_works(self) -> None:
        """Assert that an ordinary request is answered."""
        body = {"model": NAME, "prompt": "Hi", "max_tokens": 4, "temperature": 0}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == "Grü"


def events_of(text: str) -> list[tuple[str, str]]:
    """Return the (name, data) of each event of a stream; comments are left out."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        if block.startswith(":"):
            continue
        *names, data = block.split("\n")
        assert len(names) < 2 and all(name.startswith("event: ") for name in names), block
        assert data.startswith("data: "), block
        name = names[0].removeprefix("event: ") if names else ""
        events.append((name, data.removeprefix("data: ")))
    return events


@contextmanager
def running_server(options: ServerOptions | None = None) -> Iterator[RunningServer]:
    """Run a server that has no model yet; stop it, and its engine, at the end."""
    options = replace(options or ServerOptions(), port=0)
    state = ServerState(options)
    server = make_server(state)
    listener = listen(options)
    url = url_of(listener, options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    running = RunningServer(url, state, server)
    try:
        yield running
    finally:
        running.http.close()
        running.client.close()
        server.stop()
        thread.join(TIMEOUT_S)
        state.close()
        assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        pause.wait(0.005)
