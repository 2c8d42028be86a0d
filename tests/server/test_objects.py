"""Every object of the older OpenAI endpoints passes its client's own types, not only its parser.

The client builds objects without checking them, so a wrong type would only show in somebody's code.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.fakes import NAME
from tests.server.serving import RunningServer, events_of

pytestmark = pytest.mark.timeout(60)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 2, "temperature": 1.0, "seed": 1},
    {"stop": ["Wör"], "include_stop_str_in_output": True},
    {"stop_token_ids": [44]},
    {"max_tokens": 1},
    {"echo": True},
    {"return_token_ids": True},
    {"return_tokens_as_token_ids": True},
    {"return_progress": True, "timings_per_token": True},
    {"truncate_prompt_tokens": 2},
]
LOGPROBS = {COMPLETIONS: {"logprobs": 2}, CHAT: {"logprobs": True, "top_logprobs": 2}}


def options_of(path: str) -> list[dict[str, Any]]:
    with_logprobs = [{**options, **LOGPROBS[path]} for options in OPTIONS]
    return [*OPTIONS, *with_logprobs, {"prompt_logprobs": 1}]


def ask(server: RunningServer, path: str, **body: Any) -> str:
    response = server.post(path, {"temperature": 0, **BODIES[path], **body})
    assert response.status_code == 200, response.text
    return response.text


def check_completion(completion: dict[str, Any]) -> None:
    for choice in completion["choices"]:
        logprobs = choice["logprobs"] or {"token_logprobs": [0.0], "top_logprobs": [{}]}
        # Nothing stands before a prompt's first token: OpenAI sends null, and declares none.
        for values in (logprobs["token_logprobs"], logprobs["top_logprobs"]):
            if values[:1] == [None]:
                del values[0]
    Completion.model_validate_json(json.dumps(completion), strict=True)


@pytest.mark.parametrize("options", options_of(COMPLETIONS), ids=str)
def test_completions(server, options):
    check_completion(json.loads(ask(server, COMPLETIONS, **options)))


@pytest.mark.parametrize("options", options_of(CHAT), ids=str)
def test_chat_completions(server, options):
    ChatCompletion.model_validate_json(ask(server, CHAT, **options), strict=True)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunks(server, path, options):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {**options, **LOGPROBS[path], "stream": True, "stream_options": usage}
    *events, (_, done) = events_of(ask(server, path, **body))
    assert done == "[DONE]" and len(events) > 1
    for _, data in events:
        chunk = json.loads(data)
        if path == CHAT:
            ChatCompletionChunk.model_validate_json(data, strict=True)
            continue
        for choice in chunk["choices"]:
            # The client has one type for both, in which a choice has always ended.
            assert choice["finish_reason"] in (None, "stop", "length")
            choice["finish_reason"] = "stop"
        check_completion(chunk)


def test_models(server):
    [card] = server.http.get("/v1/models").json()["data"]
    Model.model_validate(card, strict=True)
    Model.model_validate_json(server.http.get(f"/v1/models/{NAME}").text, strict=True)
