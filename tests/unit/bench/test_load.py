"""The load client against a real server around a fake model."""

from __future__ import annotations

import pytest

from jaxinfer.bench.load import Call, Target, load_server
from jaxinfer.bench.serve import Objective, run_serve, serve_table, summarize
from jaxinfer.bench.workload import Workload
from jaxinfer.errors import ConfigError
from tests.server.serving import running_server

WORK = Workload(num_requests=6, prompt_tokens=4, new_tokens=5)


@pytest.fixture(scope="module")
def url():
    with running_server() as server:
        server.load()
        yield server.url


@pytest.mark.parametrize("load", [{"concurrency": 2}, {"rate": 200.0}, {}])
def test_every_request_is_answered_and_timed(url, load):
    calls, wall_s = load_server(Target(url=f"{url}/v1"), WORK, text_prompts=True, **load)
    assert [call.error for call in calls] == [None] * 6
    assert {call.num_tokens for call in calls} == {5}
    for call in calls:
        assert 0 <= call.sent < call.chunks[0] <= call.chunks[-1] <= wall_s
        assert call.sent + call.ttft_s + sum(call.itl_s) == pytest.approx(call.chunks[-1])


def test_no_more_than_so_many_are_in_flight(url):
    calls, _ = load_server(Target(url=url), WORK, text_prompts=True, concurrency=2)
    for call in calls:
        others = [c for c in calls if c is not call]
        assert sum(c.sent <= call.sent < c.chunks[-1] for c in others) <= 1


def test_what_a_server_refuses_is_told(url):
    target = Target(url=url, extra_body={"temperature": -1})
    calls, _ = load_server(target, WORK, text_prompts=True)
    assert all(call.error and "temperature" in call.error for call in calls)
    with pytest.raises(ConfigError, match="no request was answered: 400 .*temperature"):
        summarize(calls, 1.0, Objective())


def test_nobody_there_is_one_sentence():
    with pytest.raises(ConfigError, match="expected an OpenAI-compatible server"):
        load_server(Target(url="http://127.0.0.1:1"), WORK)


def test_servers_are_compared_on_the_same_requests(url):
    result = run_serve(
        {"one": Target(url=url), "other": Target(url=url)},
        WORK,
        concurrency=3,
        rate=None,
        repeats=2,
        objective=Objective(ttft_ms=0, tpot_ms=60_000),
        text_prompts=True,
    )
    one, other = result["servers"]
    assert len(one["rounds"]) == 2 and one["failed"] == other["failed"] == 0
    assert one["goodput_share"] == 0  # none comes in no time
    table = serve_table(result)
    assert "| one |" in table and "one / other: output" in table


def test_figures_are_those_of_the_calls():
    calls = [
        Call(sent=0.0, chunks=[1.0, 1.5, 2.0], num_tokens=3),
        Call(sent=1.0, chunks=[4.0, 5.0], num_tokens=5),
        Call(sent=1.0, error="500"),
    ]
    figures = summarize(calls, 5.0, Objective(ttft_ms=2000))
    assert figures["output_tok_s"] == pytest.approx(8 / 5)
    assert figures["failed"] == 1 and figures["errors"] == ["500"]
    assert figures["ttft_ms"]["p50"] == pytest.approx(2000)
    assert figures["itl_ms"]["p50"] == pytest.approx(500)
    assert figures["tpot_ms"]["p50"] == pytest.approx((500 + 250) / 2)
    assert figures["e2e_ms"]["p50"] == pytest.approx((2000 + 4000) / 2)
    assert figures["goodput_requests_s"] == pytest.approx(1 / 5)
    assert figures["tokens_a_chunk"] == pytest.approx(8 / 5)
