"""`/v1/messages` through the real Anthropic client; the client's types validate every object."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.server.fakes import NAME, REPLY
from tests.server.serving import TIMEOUT_S, RunningServer, events_of

pytestmark = pytest.mark.timeout(60)
PATH = "/v1/messages"
EVENT = TypeAdapter(RawMessageStreamEvent)
MESSAGES = [{"role": "user", "content": "Hi"}]
RENDERED = "user: Hi\nassistant: "
OPTIONS = {"model": NAME, "messages": MESSAGES, "max_tokens": 100, "temperature": 0}
# The client declares no temperature.
SDK_OPTIONS = {
    "model": NAME,
    "messages": MESSAGES,
    "max_tokens": 100,
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def client(server):
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as made:
        yield made


def ask(server: RunningServer, **body) -> dict:
    response = server.post(PATH, {**OPTIONS, **body})
    assert response.status_code == 200, response.text
    Message.model_validate(response.json())
    return response.json()


def stream(server: RunningServer, **body) -> list[dict]:
    response = server.post(PATH, {**OPTIONS, "stream": True, **body})
    assert response.status_code == 200, response.text
    named = events_of(response.text)
    events = [json.loads(data) for _, data in named]
    assert [name for name, _ in named] == [event["type"] for event in events]
    for event in events:
        EVENT.validate_python(event)
    return events


def prompt_of(server: RunningServer, name: str) -> str:
    [request] = [r for i, r in server.runner.requests.items() if i.startswith(f"msg_{name}-")]
    return bytes(request.prompt_token_ids).decode()


def test_client_gets_a_message(client):
    answer = client.messages.create(**SDK_OPTIONS)
    assert answer.id.startswith("msg_") and answer.role == "assistant"
    assert [block.text for block in answer.content] == [REPLY]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(RENDERED)
    assert usage.output_tokens == len(REPLY.encode()) + 1


def test_stop_reasons(server):
    assert ask(server, max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = ask(server, stop_sequences=["Wörld"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "Wörld")
    assert stopped["content"][0]["text"] == REPLY[: REPLY.index("Wörld")]


def test_stream_events_join_to_the_whole_message(server):
    for options in ({}, {"stop_sequences": ["🚀"]}, {"max_tokens": 5}):
        events, whole = stream(server, **options), ask(server, **options)
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        text = "".join(event["delta"]["text"] for event in events[2:-3])
        assert text == whole["content"][0]["text"]
        last = events[-2]
        assert last["delta"]["stop_reason"] == whole["stop_reason"]
        assert last["delta"]["stop_sequence"] == whole["stop_sequence"]
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_an_answer_without_text_has_no_block(server):
    assert ask(server, stop_sequences=["G"])["content"] == []
    kinds = [event["type"] for event in stream(server, stop_sequences=["G"])]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_sync_and_async_clients_stream(client, server):
    with client.messages.stream(**SDK_OPTIONS) as helper:
        assert "".join(helper.text_stream) == REPLY
        assert helper.get_final_message().stop_reason == "end_turn"

    async def run() -> str:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="none", timeout=TIMEOUT_S, max_retries=0
        ) as asynchronous:
            whole = await asynchronous.messages.create(**SDK_OPTIONS)
            async with asynchronous.messages.stream(**SDK_OPTIONS) as helper:
                text = "".join([part async for part in helper.text_stream])
            assert whole.content[0].text == text
            return text

    assert asyncio.run(run()) == REPLY


def test_system_blocks_and_roles_become_messages(server):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A", "cache_control": None}]},
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": [{"type": "text", "text": "C"}]},
        {"role": "user", "content": "D"},
    ]
    system = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    ask(server, messages=messages, system=system, request_id="blocks")
    assert prompt_of(server, "blocks") == (
        "system: S\nuser: A\nB\nassistant: C\nuser: D\nassistant: "
    )


def test_a_last_assistant_message_is_continued(server):
    ask(server, messages=[*MESSAGES, {"role": "assistant", "content": "He"}], request_id="fill")
    assert prompt_of(server, "fill") == "user: Hi\nassistant: He"


def test_tokens_are_counted_also_where_they_do_not_fit(client, server):
    count = client.messages.count_tokens(model=NAME, messages=MESSAGES, system="S")
    assert count.input_tokens == len("system: S\n" + RENDERED)
    long = [{"role": "user", "content": "a" * 5000}]
    body = {"model": NAME, "messages": long}
    response = server.post("/v1/messages/count_tokens", body)
    MessageTokensCount.model_validate(response.json())
    assert response.json()["input_tokens"] > 5000
    too_long = [{"role": "user", "content": "a" * (2**20 + 1)}]
    body = {"model": NAME, "messages": too_long}
    assert server.post("/v1/messages/count_tokens", body).status_code == 400


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "context"),
        ({"system": 5}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_errors_speak_anthropics_dialect(server, added, words):
    response = server.post(PATH, {**OPTIONS, **added})
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert words in body["error"]["message"]
    server.assert_works()


def test_client_raises_the_right_errors(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**SDK_OPTIONS, "model": "claude"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**{**SDK_OPTIONS, "extra_body": {"temperature": -1}})


def test_error_after_the_start_is_an_error_event(own_server):
    own_server.runner.step_s = 0.001
    own_server.runner.reply *= 200
    own_server.load(max_model_len=16384)
    with anthropic.Anthropic(
        base_url=own_server.url, api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as client:
        parts = client.messages.create(**{**SDK_OPTIONS, "max_tokens": 8000}, stream=True)
        iterator = iter(parts)
        assert next(iterator).type == "message_start"
        own_server.runner.error = RuntimeError("device lost at /secret/path.py")
        with pytest.raises(anthropic.APIError) as caught:
            list(iterator)
        assert "secret" not in str(caught.value)
