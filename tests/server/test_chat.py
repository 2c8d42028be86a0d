"""`/v1/chat/completions` through the real OpenAI client and raw."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.fakes import BOS, NAME, REPLY
from tests.server.serving import RunningServer

pytestmark = pytest.mark.timeout(60)
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
RENDERED = "system: Be brief.\nuser: Hi\nassistant: "


def ask(server: RunningServer, **body) -> dict:
    response = server.post(PATH, {"messages": MESSAGES, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: RunningServer, **body) -> list[dict]:
    events = server.events(PATH, {"messages": MESSAGES, "temperature": 0, **body})
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def prompt_of(answer: dict) -> str:
    return bytes(answer["prompt_token_ids"]).decode()


def test_client_gets_a_message_and_usage(server):
    answer = server.client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", REPLY)
    assert choice.finish_reason == "stop" and choice.message.refusal is None
    assert answer.usage.prompt_tokens == len(RENDERED)
    assert answer.usage.completion_tokens == len(REPLY.encode()) + 1


def test_stream_is_role_then_text_then_finish(server):
    parts = chunks(server)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])
    assert "".join(delta["content"] for delta in deltas[:-1]) == REPLY
    assert deltas[-1] == {}
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["stop"]
    assert not any("usage" in part for part in parts)
    assert len({(p["id"], p["created"], p["system_fingerprint"]) for p in parts}) == 1


def test_async_client_streams_with_usage(server):
    async def run() -> tuple[str, object]:
        async with server.async_client() as client:
            stream = await client.chat.completions.create(
                model=NAME,
                messages=MESSAGES,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            text, usage = "", None
            async for part in stream:
                usage = part.usage
                text += "".join(c.delta.content or "" for c in part.choices)
            return text, usage

    text, usage = asyncio.run(run())
    assert text == REPLY
    assert usage.total_tokens == len(RENDERED) + len(REPLY.encode()) + 1


@pytest.mark.parametrize("stop", ["Wörld", "🌍", None])
@pytest.mark.parametrize("n", [1, 3])
def test_streamed_text_equals_non_streamed(server, stop, n):
    options = {"stop": stop, "n": n, "temperature": 1.0, "seed": 4}
    texts = [""] * n
    for part in chunks(server, **options):
        [choice] = part["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    whole = ask(server, **options)["choices"]
    assert texts == [choice["message"]["content"] for choice in whole]


def test_logprobs_have_the_chat_shape(server):
    answer = server.client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=3, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["G", "r", "�"]
    # The real bytes, so that clients can join characters.
    assert bytes(b for entry in entries for b in entry.bytes) == "Grü".encode()[:3]
    assert [(t.token, t.logprob) for t in entries[0].top_logprobs] == [
        ("H", -0.25),
        ("G", -0.5),
        ("I", -9999.0),
    ]


def test_top_logprobs_are_the_likeliest_even_without_the_sampled_token(server):
    answer = ask(server, max_tokens=1, logprobs=True, top_logprobs=1)
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], [t["token"] for t in entry["top_logprobs"]]) == ("G", ["H"])


def test_logprobs_without_top_logprobs_have_empty_alternatives(server):
    answer = ask(server, max_tokens=2, logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


def test_streamed_logprobs_join_to_the_non_streamed(server):
    options = {"logprobs": True, "top_logprobs": 2}
    joined = []
    for part in chunks(server, **options):
        logprobs = part["choices"][0].get("logprobs")
        joined += logprobs["content"] if logprobs else []
    assert joined == ask(server, **options)["choices"][0]["logprobs"]["content"]


def test_prompt_logprobs_stand_on_the_response(server):
    answer = ask(server, prompt_logprobs=1)
    assert len(answer["prompt_logprobs"]) == len(RENDERED)
    assert answer["prompt_logprobs"][0] is None


def test_max_completion_tokens_wins_over_max_tokens(server):
    usage = ask(server, max_tokens=9, max_completion_tokens=2)["usage"]
    assert usage["completion_tokens"] == 2


def test_without_a_limit_the_answer_may_fill_the_context(server):
    answer = ask(server, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_template_gets_roles_parts_and_kwargs(server):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "A"}, "B"]},
        {"role": "assistant", "content": "C", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "D"},
    ]
    answer = ask(
        server,
        messages=messages,
        chat_template_kwargs={"enable_thinking": False},
        return_token_ids=True,
    )
    assert prompt_of(answer) == (
        "enable_thinking=False\nsystem: A\nB\nassistant: C\nuser: D\nassistant: "
    )


def test_continue_final_message_leaves_the_turn_open(server):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    answer = ask(server, messages=messages, return_token_ids=True, **options)
    assert prompt_of(answer) == "user: Hi\nassistant: He"
    assert answer["choices"][0]["message"]["content"] == REPLY
    echoed = ask(server, messages=messages, echo=True, **options)
    assert echoed["choices"][0]["message"]["content"] == "He" + REPLY
    texts = [
        part["choices"][0]["delta"].get("content", "")
        for part in chunks(server, messages=messages, echo=True, **options)
    ]
    assert "".join(texts) == "He" + REPLY


def test_bos_is_added_only_when_asked_for(server):
    assert BOS not in ask(server, return_token_ids=True)["prompt_token_ids"]
    answer = ask(server, return_token_ids=True, add_special_tokens=True)
    assert answer["prompt_token_ids"][0] == BOS


def test_streamed_token_ids_join_to_all_tokens(server):
    parts = chunks(server, return_token_ids=True)
    ids = [i for part in parts for i in part["choices"][0].get("token_ids", ())]
    assert ids == [*REPLY.encode(), 257]
    assert bytes(parts[0]["prompt_token_ids"]).decode() == RENDERED
    assert not any("prompt_token_ids" in part for part in parts[1:])


def test_whole_client_objects_may_be_sent_back(server):
    """Chat loops append `message.model_dump()`, with its nulls and empty lists."""
    first = server.client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0)
    dumped = first.choices[0].message.model_dump()
    messages = [*MESSAGES, {**dumped, "annotations": []}, {"role": "user", "content": "More"}]
    answer = ask(server, messages=messages, return_token_ids=True)
    assert prompt_of(answer).endswith(f"assistant: {REPLY}\nuser: More\nassistant: ")


def test_template_failure_is_the_callers_error(server):
    body = {"messages": MESSAGES, "chat_template_kwargs": {"fail": 1}}
    response = server.post(PATH, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    server.assert_works()
