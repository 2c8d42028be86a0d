"""The life of a server: loading, ready, draining; and the small routes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import serve
from tests.server.fakes import NAME
from tests.server.serving import TIMEOUT_S, wait_until

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]

# A whole server process around the reciting model; {load} loads it.
SCRIPT = """
import time
from jaxinfer.config import EngineConfig
from jaxinfer.server.run import serve
from jaxinfer.server.options import ServerOptions
from tests.server.fakes import RecitingRunner, make_loaded

def load(config):
    {load}

serve(EngineConfig(), ServerOptions(port=0, drain_timeout_s=20), load=load)
"""
LOAD = "r = RecitingRunner(); r.step_s = 0.001; return make_loaded(r, max_model_len=4096)"


@contextmanager
def started(load: str = LOAD) -> Iterator[subprocess.Popen]:
    """Run the script; leave no process behind, whatever the test finds."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(load=load)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(stream, word: str) -> str:
    """Return the line with `word`; the pipe closes, and this fails, when the process ends."""
    for line in stream:
        if word in line:
            return line
    raise AssertionError(f"no line with {word!r}")


def ready_url(process: subprocess.Popen) -> str:
    return read_until(process.stdout, "is ready at").split()[-1].removesuffix("/v1")


def test_health_goes_from_loading_to_ok_to_draining(own_server):
    http = own_server.http
    for path in ("/health", "/ping"):
        response = http.get(path)
        assert response.status_code == 503 and response.headers["Retry-After"]
        assert response.json()["status"] == "loading"
        assert response.json()["error"]["code"] == 503
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
        response = http.request(method, path, json={"prompt": "Hi"})
        assert response.status_code == 503 and "loading" in response.json()["error"]["message"]
    own_server.load()
    assert http.get("/health").json() == {"status": "ok"}
    assert http.post("/ping").status_code == 200
    own_server.assert_works()
    own_server.state.drain()
    assert http.get("/health").json()["status"] == "shutting down"
    response = own_server.post("/v1/completions", {"prompt": "Hi"})
    assert response.status_code == 503 and response.headers["Retry-After"]


def test_models_and_version(server):
    [model] = server.client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "jaxinfer")
    assert model.max_model_len == 512 and model.parent is None
    assert server.client.models.retrieve(NAME).id == NAME
    assert server.http.get("/version").json()["version"]
    assert server.http.head("/health").status_code == 200


def test_curl_line_works_then_sigterm_lets_the_running_request_end():
    body = {"prompt": "Hi", "ignore_eos": True, "max_tokens": 1000, "stream": True}
    with started() as process:
        url = ready_url(process)
        lines = [line.strip() for line in (process.stdout.readline() for _ in range(4))]
        command = " ".join(line.removesuffix("\\") for line in lines if line)
        answer = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        assert '"role":"assistant"' in answer.stdout
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        _, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, err
        assert "SIGTERM: draining" in err


def test_second_signal_ends_at_once():
    body = {"prompt": "Hi", "ignore_eos": True, "max_tokens": 4000, "stream": True}
    with started() as process:
        url = ready_url(process)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as stream:
            lines = stream.iter_lines()  # dropping it would close the connection
            next(lines)
            process.send_signal(signal.SIGINT)
            read_until(process.stderr, "SIGINT: draining")
            asked = time.monotonic()
            process.send_signal(signal.SIGINT)
            process.wait(TIMEOUT_S)
            assert time.monotonic() - asked < 2
        assert process.returncode == 130


def test_port_answers_503_while_loading_and_a_signal_ends_it():
    with started("time.sleep(600)") as process:
        line = read_until(process.stderr, "listening on")
        url = line.split("listening on ")[1].split(",")[0]
        assert httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("error", "traced"),
    [
        (ConfigError("no model at here; give --model a folder"), False),
        (RuntimeError("what is this"), True),
    ],
)
def test_load_failure_ends_the_process_with_code_2(error, traced, capsys, caplog):
    def load(config: EngineConfig) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        serve(EngineConfig(), ServerOptions(port=0), load=load)
    assert caught.value.code == 2
    assert f"the model cannot be loaded: {error}" in capsys.readouterr().err
    assert any(record.exc_info for record in caplog.records) == traced


def test_port_in_use_is_a_clear_error(server, capsys):
    with pytest.raises(SystemExit) as caught:
        serve(EngineConfig(), ServerOptions(port=int(server.url.rsplit(":", 1)[1])))
    assert caught.value.code == 2
    assert "Choose another --port" in capsys.readouterr().err


def test_server_stops_while_a_client_stays_connected(own_server):
    own_server.load()
    own_server.assert_works()  # the client keeps its connection open
    own_server.server.stop()
    wait_until(lambda: not own_server.server.server_state.connections)
