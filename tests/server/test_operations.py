"""A server in operation: draining, the watchdog, the log, traces."""

from __future__ import annotations

import io
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.metrics import EngineStats
from jaxinfer.server.access_log import JsonFormatter
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.tracing import NoTracer, SpanTracer, make_tracer
from jaxinfer.server.watchdog import Watchdog
from tests.server.serving import TIMEOUT_S, running_server, wait_until
from tests.server.test_health import ready_url, started

pytestmark = pytest.mark.timeout(60)
LONG = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Hi", "max_tokens": 4, "temperature": 0}


def test_while_it_drains_probes_and_new_clients_get_an_answer():
    body = {**LONG, "max_tokens": 4000}
    with started() as process, httpx.Client(base_url=ready_url(process), timeout=TIMEOUT_S) as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: http.get("/health").status_code == 503)
            health = http.get("/health")
            assert health.json()["status"] == "shutting down" and health.headers["Retry-After"]
            refused = http.post("/v1/completions", json=SHORT)
            assert refused.status_code == 503 and refused.headers["Connection"] == "close"
            assert next(line for line in lines if line).startswith("data: {")  # it goes on
        # Its last client has left, so there is nothing to wait for.
        _, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, err


def test_what_does_not_end_in_time_is_told_so_and_cut():
    with running_server(ServerOptions(drain_timeout_s=0.3)) as server:
        server.load()
        server.runner.step_s = 0.02
        with server.http.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            whole: list[httpx.Response] = []
            waiting = threading.Thread(
                target=lambda: whole.append(
                    server.post("/v1/completions", {**LONG, "stream": False})
                )
            )
            waiting.start()
            wait_until(lambda: server.state.num_in_flight == 2)
            start = time.monotonic()
            server.server.stop()
            *_, error, done = [line for line in lines if line]
        assert time.monotonic() - start < 5
        assert "shutting down" in error and '"code": 503' in error and done == "data: [DONE]"
        waiting.join(TIMEOUT_S)
        assert whole[0].status_code == 503 and "shutting down" in whole[0].text
        server.assert_idle()


class StuckEngine:
    """What the watchdog sees of an engine; a test changes it."""

    def __init__(self) -> None:
        self.stats = EngineStats(num_requests_waiting=3, num_steps=7, generation_tokens=100)
        self.is_alive = True
        self.num_live_requests = 3


def test_requests_that_wait_for_steps_that_never_come_are_a_stall():
    engine = StuckEngine()
    watchdog = Watchdog(engine, 0.1)
    assert watchdog.stalled_s == 0
    wait_until(lambda: watchdog.stalled_s > 0.1)
    engine.stats.num_steps += 1  # it goes on
    assert watchdog.stalled_s == 0
    wait_until(lambda: watchdog.stalled_s > 0.1)
    engine.num_live_requests = 0  # nobody waits: silence is no stall
    assert watchdog.stalled_s == 0


def test_a_step_that_hangs_makes_health_503_and_leaves_a_stack_in_the_log(caplog):
    with running_server(ServerOptions(stall_timeout_s=0.2)) as server:
        server.load()
        server.assert_works()
        released = threading.Event()
        fetch = server.runner.fetch

        def hang(plan, step):
            released.wait(TIMEOUT_S)
            return fetch(plan, step)

        server.runner.fetch = hang
        thread = threading.Thread(target=server.post, args=("/v1/completions", SHORT))
        thread.start()
        try:
            wait_until(lambda: server.http.get("/health").status_code == 503)
            health = server.http.get("/health")
            assert health.json()["status"] == "stalled" and health.headers["Retry-After"]
            wait_until(lambda: "no progress for" in caplog.text)
            assert "in hang" in caplog.text and "1 live requests" in caplog.text
            assert server.series()["jaxinfer_engine_busy_seconds"] > 0.2
        finally:
            released.set()
        thread.join(TIMEOUT_S)
        wait_until(lambda: server.http.get("/health").status_code == 200)
        wait_until(lambda: "makes progress again" in caplog.text)


def fields_of(caplog, path: str) -> dict:
    [fields] = [
        record.fields
        for record in caplog.records
        if record.name == "jaxinfer.access" and record.fields["path"] == path
    ]
    return fields


def test_each_request_is_one_line_that_says_how_it_went(own_server, caplog):
    caplog.set_level(logging.INFO, "jaxinfer.access")
    own_server.load()
    headers = {"X-Request-Id": "my-id"}
    response = own_server.http.post("/v1/completions", json=SHORT, headers=headers)
    wait_until(lambda: "my-id" in caplog.text)
    fields = fields_of(caplog, "/v1/completions")
    assert (fields["method"], fields["status"], fields["request_id"]) == ("POST", 200, "my-id")
    assert fields["bytes"] == len(response.content) and fields["stream"] is False
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (3, 4)
    assert fields["duration_s"] > 0 and fields["client"].startswith("127.0.0.1:")
    assert "POST /v1/completions 200 " in caplog.text and "completion_tokens=4" in caplog.text
    own_server.http.get("/health")
    own_server.http.get("/v1/models")
    wait_until(lambda: "/v1/models" in caplog.text)
    assert "/health" not in caplog.text  # a probe that succeeds
    assert "Hi" not in caplog.text  # what was asked is nobody's business


def test_a_client_that_leaves_is_in_the_log(own_server, caplog):
    caplog.set_level(logging.INFO, "jaxinfer.access")
    own_server.load()
    own_server.runner.step_s = 0.005
    with own_server.http.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
    wait_until(lambda: "disconnected=True" in caplog.text)
    fields = fields_of(caplog, "/v1/completions")
    assert fields["stream"] is True and 0 < fields["completion_tokens"] < 400


def test_no_client_can_forge_a_line(own_server, caplog):
    caplog.set_level(logging.INFO, "jaxinfer.access")
    host, port = own_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as client:
        client.sendall(
            b"GET /a%0aINFO%20jaxinfer:%20forged\x7f HTTP/1.1\r\nHost: x\r\n"
            b"X-Request-Id: x y\r\n\r\n"
        )
        client.recv(65536)
    own_server.http.get("/%0d%0aforged")
    wait_until(lambda: "forged" in caplog.text)
    for record in caplog.records:
        assert "\n" not in record.getMessage() and "\r" not in record.getMessage()


def test_json_log_is_one_object_per_line():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("jaxinfer.test")
    logger.addHandler(handler)
    logger.info("two\nlines %s", "\x00", extra={"fields": {"status": 200, "duration_s": 0.5}})
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logger.exception("oh")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "two\nlines \x00" and first["status"] == 200
    assert first["level"] == "info" and first["time"].endswith("Z")
    assert "RuntimeError: broken" in second["traceback"]


class Spans:
    """Keeps what would be sent."""

    def __init__(self):
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def by_name(self):
        return {span.name: span for span in self._exporter.get_finished_spans()}


def test_a_request_is_a_span_in_its_callers_trace_with_its_stages(own_server):
    pytest.importorskip("opentelemetry.sdk")
    spans = Spans()
    own_server.state.tracer = SpanTracer(spans.provider)
    own_server.load()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "my-id"}
    own_server.http.get("/v1/models")
    own_server.http.post("/v1/completions", json={**SHORT, "n": 0}, headers=headers)
    wait_until(lambda: len(spans.by_name()) == 1)  # what runs no model has no stages
    own_server.http.post("/v1/completions", json=SHORT, headers=headers)
    wait_until(lambda: len(spans.by_name()) == 4)
    found = spans.by_name()
    span = found["POST /v1/completions"]
    assert f"{span.context.trace_id:032x}" == trace and f"{span.parent.span_id:016x}" == parent
    facts = span.attributes
    assert facts["gen_ai.usage.prompt_tokens"] == 3
    assert facts["gen_ai.usage.completion_tokens"] == 4
    assert facts["gen_ai.request.max_tokens"] == 4 and facts["gen_ai.request.model"] == "tiny"
    assert facts["gen_ai.request.id"] == "my-id" and facts["http.response.status_code"] == 200
    assert facts["gen_ai.latency.e2e"] >= facts["gen_ai.latency.time_to_first_token"] > 0
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent.span_id == span.context.span_id
        assert span.start_time <= found[name].start_time <= found[name].end_time


def test_traces_without_opentelemetry_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxinfer\[otel\]'"):
        make_tracer("http://127.0.0.1:4318/v1/traces")
    assert isinstance(make_tracer(None), NoTracer)


def test_opentelemetry_is_not_imported_unless_asked_for():
    code = (
        "import sys, jaxinfer.server.run, jaxinfer.server.state as s; s.ServerState().close();"
        "print(*[m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == ""


def test_traces_reach_a_collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as collector:
        collector.settimeout(TIMEOUT_S)
        port = collector.getsockname()[1]
        options = ServerOptions(otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces")
        with running_server(options) as server:
            server.load()
            server.assert_works()
            received: list[bytes] = []

            def collect() -> None:
                connection, _ = collector.accept()
                with connection:
                    received.append(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

            collecting = threading.Thread(target=collect)
            collecting.start()
            server.state.tracer.close()
            collecting.join(TIMEOUT_S)
        assert received[0].startswith(b"POST /v1/traces HTTP/1.1")
