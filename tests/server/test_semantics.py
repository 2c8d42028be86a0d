"""What vLLM's and llama.cpp's own fields do: cutting, aliases, progress, pings, timings."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.server.options import ServerOptions
from jaxinfer.truncation import Truncation
from tests.server.fakes import BOS, REPLY
from tests.server.serving import RunningServer, events_of, running_server, wait_until

pytestmark = pytest.mark.timeout(60)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {COMPLETIONS: {"prompt": "Hi"}, CHAT: {"messages": MESSAGES}}


def ask(server: RunningServer, path: str = COMPLETIONS, **body) -> dict:
    response = server.post(path, {**BODIES[path], "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: RunningServer, path: str = COMPLETIONS, **body) -> list[dict]:
    body = {**BODIES[path], "temperature": 0, "stream": True, **body}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    *events, (_, done) = events_of(response.text)
    assert done == "[DONE]"
    return [json.loads(data) for _, data in events]


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=30),
    st.integers(1, 40),
    st.sampled_from(["left", "right"]),
    st.booleans(),
)
def test_cutting_keeps_the_right_end_and_the_bos(ids, keep, side, with_bos):
    ids = [BOS] * with_bos + ids
    cut = Truncation(keep=keep, side=side).cut(ids, BOS)
    assert len(cut) == min(keep, len(ids))
    if side == "right":
        assert cut == ids[:keep]
    elif with_bos and 1 < keep < len(ids):
        assert cut[0] == BOS and cut[1:] == ids[-(keep - 1) :]
    else:
        assert cut == ids[-keep:]


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"prompt": "abcdef", "truncate_prompt_tokens": 3}, [BOS, *b"ef"]),
        ({"prompt": "abcdef", "truncate_prompt_tokens": 1}, [*b"f"]),
        (
            {"prompt": "abcdef", "truncate_prompt_tokens": 3, "truncation_side": "right"},
            [BOS, *b"ab"],
        ),
        ({"prompt": "abcdef", "truncate_prompt_tokens": 7}, [BOS, *b"abcdef"]),
        ({"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2}, [3, 4]),
        ({"prompt": "x" * 1_000_000, "truncate_prompt_tokens": 4}, [BOS, *b"xxx"]),
    ],
    ids=lambda x: repr(x)[-60:],
)
def test_a_prompt_is_cut_to_what_the_request_allows(server, body, ids):
    answer = ask(server, **body, return_token_ids=True, max_tokens=1)
    assert answer["choices"][0]["prompt_token_ids"] == ids
    text = body["prompt"]
    whole = len(text) + isinstance(text, str)
    assert answer["usage"]["prompt_tokens_details"]["truncated"] == (len(ids) < whole)


def test_minus_one_cuts_to_what_the_context_holds_besides_the_answer(server):
    options = {"truncate_prompt_tokens": -1, "max_tokens": 40, "ignore_eos": True}
    usage = ask(server, prompt="x" * 5000, **options)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (472, 40)
    messages = [{"role": "user", "content": "x" * 5000}]
    usage = ask(server, CHAT, messages=messages, **options)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (472, 40)
    assert "truncated" not in ask(server)["usage"]["prompt_tokens_details"]


def test_echo_of_a_cut_prompt_is_what_ran(server):
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 3, "echo": True, "logprobs": 0}
    [choice] = ask(server, **body, max_tokens=1)["choices"]
    assert choice["text"] == "efG"
    assert choice["logprobs"]["tokens"][1:] == ["e", "f", "G"]


def test_n_predict_is_max_tokens_and_minus_one_is_all_there_is(server):
    assert ask(server, n_predict=3)["usage"]["completion_tokens"] == 3
    assert ask(server, n_predict=-1, ignore_eos=True)["usage"]["total_tokens"] == 512
    assert ask(server, CHAT, n_predict=2)["usage"]["completion_tokens"] == 2
    assert ask(server, CHAT, n_predict=-1, ignore_eos=True)["usage"]["total_tokens"] == 512
    assert ask(server, n_predict=3, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_llama_cpps_names_mean_ours(server):
    answer = ask(server, n_cmpl=2, temperature=1, seed=8, n_probs=1, max_tokens=2)
    assert len(answer["choices"]) == 2
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
    seen = set(server.runner.requests)
    ask(server, repeat_penalty=1.5, repeat_last_n=-1, logit_bias=[[65, -2.5], [66, 1]])
    [name] = set(server.runner.requests) - seen
    params = server.runner.requests[name].params
    assert (params.repetition_penalty, params.logit_bias) == (1.5, {65: -2.5, 66: 1.0})
    ask(server, repeat_penalty=1.0)  # asks for nothing, whatever the window


def test_cache_prompt_false_neither_finds_nor_leaves_anything(server):
    prompt = list(range(100, 150))
    for cache_prompt, cached in ((False, 0), (False, 0), (True, 0), (False, 0), (True, 48)):
        usage = ask(server, prompt=prompt, cache_prompt=cache_prompt)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("path", BODIES)
def test_timings_tell_where_the_time_went(server, path):
    timings = ask(server, path)["timings"]
    num_tokens = min(len(REPLY.encode()) + 1, 16 if path == COMPLETIONS else 512)
    assert timings["predicted_n"] == num_tokens
    assert timings["prompt_n"] + timings["cache_n"] == (3 if path == COMPLETIONS else 20)
    assert all(value >= 0 for value in timings.values())
    assert timings["predicted_per_second"] == pytest.approx(
        1e3 * num_tokens / timings["predicted_ms"], rel=0.01
    )
    assert ["timings" in part for part in chunks(server, path)][-1]
    assert sum("timings" in part for part in chunks(server, path)) == 1
    with_usage = chunks(server, path, stream_options={"include_usage": True})
    assert [part["choices"] for part in with_usage if "timings" in part] == [[]]
    assert all("timings" in part for part in chunks(server, path, timings_per_token=True))


@pytest.mark.parametrize("path", BODIES)
def test_progress_of_a_long_prompt_comes_before_its_text(own_server, path):
    own_server.runner.step_s = 0.01
    own_server.load(max_model_len=4096, max_num_batched_tokens=256)
    text = "x" * 2000
    body = (
        {"prompt": text}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": text}]}
    )
    parts = chunks(own_server, path, **body, return_progress=True)
    progress = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert all("prompt_progress" in part for part in parts[: len(progress)])
    done = [step["processed"] for step in progress]
    assert done == sorted(done) and len(set(done)) > 3
    assert {step["total"] for step in progress} == {2001 if path == COMPLETIONS else 2018}
    assert all(step["processed"] <= step["total"] for step in progress)
    assert not any("prompt_progress" in part for part in chunks(own_server, path, **body))


@pytest.mark.parametrize("path", [*BODIES, "/v1/responses", "/v1/messages"])
def test_a_silent_stream_gets_pings_and_stays_whole(path):
    with running_server(ServerOptions(sse_ping_interval_s=0.02)) as server:
        server.runner.step_s = 0.1
        server.load()
        body = {
            **{"/v1/responses": {"input": "Hi"}, "/v1/messages": {"messages": MESSAGES}}.get(
                path, BODIES.get(path, {})
            ),
            "stream": True,
            "temperature": 0,
            "max_output_tokens" if path == "/v1/responses" else "max_tokens": 3,
        }
        response = server.post(path, body)
        assert response.status_code == 200
        assert response.text.startswith(": ping\n\n")
        assert response.text.count(": ping\n\n") > 3
        texts = [data for _, data in events_of(response.text) if data != "[DONE]"]
        assert all(json.loads(text) for text in texts)


def test_requests_choose_their_own_pings(own_server):
    own_server.runner.step_s = 0.05
    own_server.load()
    body = {"prompt": "Hi", "stream": True, "max_tokens": 3, "sse_ping_interval": -1}
    assert "ping" not in own_server.post(COMPLETIONS, body).text


def test_an_error_after_a_ping_is_an_error_event():
    with running_server(ServerOptions(sse_ping_interval_s=0.02)) as server:
        server.runner.step_s = 0.2
        server.load()
        body = {"prompt": "Hi", "stream": True}
        with server.http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": ping" and response.status_code == 200
            server.runner.error = RuntimeError("device lost")
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["error"]["code"] == 503


def test_a_client_that_leaves_between_pings_is_noticed():
    with running_server(ServerOptions(sse_ping_interval_s=0.02)) as server:
        server.runner.step_s = 0.05
        server.load(max_model_len=4096)
        body = {"prompt": "Hi", "stream": True, "ignore_eos": True, "max_tokens": 4000}
        with server.http.stream("POST", COMPLETIONS, json=body) as response:
            assert next(response.iter_lines()) == ": ping"
        wait_until(lambda: server.state.num_in_flight == 0)
        server.assert_idle()


def test_the_requests_own_template_needs_the_servers_trust(server):
    body = {"messages": MESSAGES, "chat_template": "mine", "return_token_ids": True}
    assert server.post(CHAT, body).json()["error"]["param"] == "chat_template"
    with running_server(ServerOptions(trust_request_chat_template=True)) as trusting:
        trusting.load()
        answer = trusting.post(CHAT, body).json()
        assert bytes(answer["prompt_token_ids"]) == b"mine"


def test_log_probabilities_of_named_tokens_come_besides(server):
    options = {"logprob_token_ids": [65, 66], "max_tokens": 1}
    [choice] = ask(server, **options, logprobs=1)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"G": -0.5, "H": -0.25, "A": -67.0, "B": -68.0}]
    [choice] = ask(server, CHAT, **options, logprobs=True)["choices"]
    [entry] = choice["logprobs"]["content"]
    assert [(t["token"], t["logprob"]) for t in entry["top_logprobs"]] == [
        ("A", -67.0),
        ("B", -68.0),
    ]


def test_load_counts_what_is_being_answered(own_server):
    own_server.runner.step_s = 0.001
    own_server.load(max_model_len=8192)
    assert own_server.http.get("/load").json() == {"server_load": 0}
    body = {"prompt": "Hi", "stream": True, "ignore_eos": True, "max_tokens": 8000}
    with own_server.http.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()  # dropping it would close the connection
        next(lines)
        assert own_server.state.num_in_flight == 1
    wait_until(lambda: own_server.http.get("/load").json() == {"server_load": 0})


def test_health_generate_needs_a_real_token(own_server):
    assert own_server.http.get("/health/generate").status_code == 503
    own_server.load()
    steps = own_server.engine.stats.num_steps
    assert own_server.http.get("/health/generate").json()["status"] == "ok"
    assert own_server.engine.stats.num_steps > steps
    own_server.runner.error = RuntimeError("device lost")
    assert own_server.http.get("/health/generate").status_code == 503


def test_health_generate_does_not_wait_for_ever():
    with running_server(ServerOptions(health_timeout_s=0.05)) as server:
        server.runner.step_s = 0.5
        server.load()
        response = server.http.get("/health/generate")
        assert response.status_code == 503 and "no token" in response.json()["error"]["message"]
        server.assert_idle()
