"""`/tokenize`, `/detokenize` and render, in the dialects of vLLM and llama.cpp."""

from __future__ import annotations

import pytest

from tests.server.fakes import BOS, NAME
from tests.server.serving import RunningServer

pytestmark = pytest.mark.timeout(60)
MESSAGES = [{"role": "user", "content": "Hi"}]
RENDERED = "user: Hi\nassistant: "
RENDER = "/v1/chat/completions/render"


def ask(server: RunningServer, path: str, body: dict) -> dict:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_vllm_text(server):
    answer = ask(server, "/tokenize", {"model": NAME, "prompt": "Hü"})
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS, *"Hü".encode()],
        "token_strs": None,
    }
    body = {"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True}
    answer = ask(server, "/tokenize", body)
    assert (answer["tokens"], answer["token_strs"]) == ([72, 105], ["H", "i"])


def test_vllm_messages_are_what_chat_would_run(server):
    answer = ask(server, "/tokenize", {"messages": MESSAGES})
    assert bytes(answer["tokens"]).decode() == RENDERED
    closed = ask(server, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert bytes(closed["tokens"]).decode() == "user: Hi\n"
    chat = {"messages": MESSAGES, "return_token_ids": True, "max_tokens": 1}
    assert ask(server, "/v1/chat/completions", chat)["prompt_token_ids"] == answer["tokens"]


def test_llama_cpp_text(server):
    assert ask(server, "/tokenize", {"content": "Hü"}) == {"tokens": list("Hü".encode())}
    body = {"content": "Hü", "add_special": True, "with_pieces": True}
    assert ask(server, "/tokenize", body)["tokens"] == [
        {"id": BOS, "piece": "<256>"},
        {"id": 72, "piece": "H"},
        {"id": 195, "piece": [195]},
        {"id": 188, "piece": [188]},
    ]
    assert ask(server, "/tokenize", {"content": ""}) == {"tokens": []}


def test_detokenize_speaks_to_both(server):
    tokens = list("Grüße 🌍".encode())
    answer = ask(server, "/detokenize", {"tokens": tokens})
    assert answer == {"prompt": "Grüße 🌍", "content": "Grüße 🌍"}
    assert ask(server, "/detokenize", {"tokens": []})["content"] == ""
    assert ask(server, "/detokenize", {"tokens": [BOS, 255]})["content"] == "<256>\ufffd"


def test_texts_that_do_not_fit_are_counted(server):
    assert ask(server, "/tokenize", {"prompt": "a" * 100_000})["count"] == 100_001


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a" * (2**20 + 1)}, "prompt"),
        ("/tokenize", {"content": "a" * (2**20 + 1)}, "content"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        (RENDER, {"messages": [], "temperature": 0}, "messages"),
        (RENDER, {"messages": MESSAGES, "temperature": -1}, "temperature"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_bad_requests_name_the_field(server, path, body, param):
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_render_shows_what_would_run_and_runs_nothing(server):
    steps = server.engine.stats.num_steps
    answer = ask(server, RENDER, {"messages": MESSAGES, "temperature": 0.5, "request_id": "r"})
    assert (answer["request_id"], answer["prompt"]) == ("r", RENDERED)
    assert bytes(answer["token_ids"]).decode() == RENDERED
    assert answer["sampling_params"]["temperature"] == 0.5
    assert server.engine.stats.num_steps == steps
