"""One HTTP front over several replicas: placing, metrics by engine, one that breaks."""

from __future__ import annotations

import threading

import pytest

from tests.server.fakes import RecitingRunner, make_loaded
from tests.server.serving import TIMEOUT_S, RunningServer, running_server, wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def two():
    """A server with two replicas, and their runners."""
    with running_server() as server:
        runners = [RecitingRunner(), RecitingRunner()]
        server.state.serve([make_loaded(runner) for runner in runners])
        yield server, runners


def of_engines(server: RunningServer, name: str) -> list[float]:
    """The series of that name, by engine label."""
    lines = server.http.get("/metrics").text.splitlines()
    assert len([line for line in lines if line.startswith("# TYPE vllm:num_preemptions")]) == 1
    found = [line for line in lines if line.startswith(name + "{")]
    assert [f'engine="{i}"' in line for i, line in enumerate(found)] == [True, True]
    return [float(line.rsplit(" ", 1)[1]) for line in found]


def test_requests_of_one_prefix_go_to_one_replica_and_both_are_counted(two):
    server, _ = two
    for i in range(3):
        for system in ("You are kind. " * 8, "Answer in French. " * 8):
            body = {"prompt": f"{system}{i}", "max_tokens": 4, "temperature": 0}
            assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "Grü"
    assert of_engines(server, "vllm:generation_tokens_total") == [12, 12]
    assert of_engines(server, "vllm:time_to_first_token_seconds_count") == [3, 3]
    hits = of_engines(server, "vllm:prefix_cache_hits_total")
    assert min(hits) >= 2 * 96  # all but the first request of each
    assert of_engines(server, "jaxinfer_engine_alive") == [1, 1]
    assert server.http.get("/health").json() == {"status": "ok"}


def test_a_replica_that_breaks_is_a_503_for_its_requests_and_no_more(two, caplog):
    server, runners = two
    for runner in runners:
        runner.step_s = 0.005
    body = {"max_tokens": 200, "ignore_eos": True}
    answers = {}

    def ask(i: int) -> None:
        answers[i] = server.post("/v1/completions", {**body, "prompt": f"{i:04d}" * 8})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(runner.requests) == 2 for runner in runners))
    runners[0].error = RuntimeError("secret path /etc/nothing")
    for thread in threads:
        thread.join(TIMEOUT_S)
    statuses = [answers[i].status_code for i in range(4)]
    assert sorted(statuses) == [200, 200, 503, 503]
    failed = next(answer for answer in answers.values() if answer.status_code == 503)
    assert failed.headers["Retry-After"] and "secret" not in failed.text
    assert "the same request may succeed" in failed.json()["error"]["message"]
    health = server.http.get("/health")
    assert health.status_code == 200 and health.json() == {"status": "degraded"}
    assert of_engines(server, "jaxinfer_engine_alive") == [0, 1]
    for i in range(4):
        ask(i)
        assert answers[i].status_code == 200
    runners[1].error = RuntimeError("and this one")
    ask(0)
    assert answers[0].status_code == 503 and "restart the server" in answers[0].text
    assert server.http.get("/health").json()["status"] == "dead"
