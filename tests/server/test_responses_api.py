"""`/v1/responses` through the real OpenAI client, every object validated by the client's types."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.fakes import NAME, REPLY
from tests.server.serving import RunningServer, events_of

pytestmark = pytest.mark.timeout(60)
PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
RENDERED = "user: Hi\nassistant: "


def ask(server: RunningServer, **body) -> dict:
    response = server.post(PATH, {"input": "Hi", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


def stream(server: RunningServer, **body) -> list[dict]:
    """Return the events of a stream, each checked for its name, number and type."""
    response = server.post(PATH, {"input": "Hi", "temperature": 0, "stream": True, **body})
    assert response.status_code == 200, response.text
    named = events_of(response.text)
    events = [json.loads(data) for _, data in named]
    assert [name for name, _ in named] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


def text_of(answer: dict) -> str:
    [item] = answer["output"]
    [part] = item["content"]
    return part["text"]


def prompt_of(server: RunningServer, name: str) -> str:
    [request] = [r for i, r in server.runner.requests.items() if i.startswith(f"resp_{name}-")]
    return bytes(request.prompt_token_ids).decode()


def test_client_gets_a_completed_response(server):
    answer = server.client.responses.create(model=NAME, input="Hi", temperature=0)
    assert answer.output_text == REPLY and answer.id.startswith("resp_")
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.usage.input_tokens == len(RENDERED)
    assert answer.usage.output_tokens == len(REPLY.encode()) + 1
    assert answer.temperature == 0 and answer.store is False


def test_request_fields_come_back(server):
    fields = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 100,
        "top_p": 0.5,
        "truncation": "auto",
        "user": "me",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    answer = ask(server, **fields)
    assert {name: answer[name] for name in fields} == fields


def test_length_makes_it_incomplete(server):
    answer = ask(server, max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert answer["output"][0]["status"] == "incomplete"
    assert stream(server, max_output_tokens=3)[-1]["type"] == "response.incomplete"


def test_input_items_and_instructions_become_messages(server):
    first = ask(server)
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "message", "role": "user", "content": "B"},
        # The output of an answer may be sent back as it came.
        *first["output"],
        {"role": "user", "content": [{"type": "input_text", "text": "C"}]},
    ]
    ask(server, input=items, instructions="I", request_id="items")
    assert prompt_of(server, "items") == (
        f"system: I\nsystem: A\nuser: B\nassistant: {REPLY}\nuser: C\nassistant: "
    )


def test_stream_events_join_to_the_whole_answer(server):
    events = stream(server)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert "".join(deltas) == REPLY
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    whole, last = ask(server), events[-1]["response"]
    assert text_of(last) == text_of(whole) == events[-4]["text"]
    assert {e["item_id"] for e in events if "item_id" in e} == {last["output"][0]["id"]}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_async_client_streams_and_the_helper_collects(server):
    async def run() -> str:
        async with server.async_client() as client:
            text = ""
            async for event in await client.responses.create(
                model=NAME, input="Hi", temperature=0, stream=True
            ):
                text += event.delta if event.type == "response.output_text.delta" else ""
            return text

    assert asyncio.run(run()) == REPLY
    with server.client.responses.stream(model=NAME, input="Hi", temperature=0) as helper:
        helper.until_done()
        assert helper.get_final_response().output_text == REPLY


def test_logprobs_are_included_on_request(server):
    options = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 3,
    }
    entries = ask(server, **options)["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["G", "r", "\ufffd"]
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["H", "G"]
    events = stream(server, **options)
    deltas = [event for event in events if event["type"].endswith("text.delta")]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == entries


@pytest.mark.parametrize(
    ("added", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"truncation": "disabled", "truncate_prompt_tokens": 5}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": "a" * 600}, "input"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_what_cannot_be_done_is_refused_by_name(server, added, param):
    response = server.post(PATH, {"input": "Hi", **added})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    server.assert_works()


def test_an_absent_store_is_no_store_and_gets_are_not_found(server):
    answer = ask(server)
    assert answer["store"] is False and answer["previous_response_id"] is None
    assert server.http.get(f"{PATH}/{answer['id']}").status_code == 404


def test_truncation_auto_answers_what_disabled_refuses(server):
    long = "a" * 600
    assert server.post(PATH, {"input": long, "truncation": "disabled"}).status_code == 400
    answer = ask(server, input=long, truncation="auto", max_output_tokens=10)
    assert answer["usage"]["input_tokens"] == 502


def test_error_after_the_start_is_an_event_of_its_own(own_server):
    own_server.runner.step_s = 0.001
    own_server.load(max_model_len=8192)
    body = {"input": "Hi", "ignore_eos": True, "stream": True, "temperature": 0}
    with own_server.http.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        own_server.runner.error = RuntimeError("device lost at /secret/path.py")
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error" and "secret" not in rest[-1]
    event = json.loads(rest[-1].removeprefix("data: "))
    EVENT.validate_python(event)
    assert event["code"] == "server_error"


def test_client_raises_the_right_errors(server):
    with pytest.raises(openai.NotFoundError):
        server.client.responses.create(model="gpt-4", input="Hi")
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.responses.create(model=NAME, input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
