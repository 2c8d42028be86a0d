"""However an output is cut into steps, what a stream's events join to is the whole answer.

The calls of all dialects run on a stand-in for `AsyncEngine` that hands out one output in the
pieces that hypothesis chooses: bytes that are no text, stop strings over several tokens, several
samples at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.generation import Generation
from jaxinfer.input_processor import InputProcessor
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import FinishReason, TokenLogprobs, TokenOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.anthropic import MessagesCall
from jaxinfer.server.call import Call, ServedModel
from jaxinfer.server.chat import ChatCall
from jaxinfer.server.completions import CompletionCall
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.responses_api import ResponseCall
from tests.server.fakes import EOS, VOCAB_SIZE, ByteTokenizer
from tests.server.serving import events_of

MESSAGES = [{"role": "user", "content": "Hi"}]
STOPS = ("Wör", "🌍", "\ufffd", "a", "ab")


@dataclass
class Script:
    """What the stand-in plays.

    Attributes:
        reply: The output's tokens, for each sample.
        pieces: How many of them come at a time; the last number repeats.
        ends: Whether the output ends by itself or at its limit.
    """

    reply: list[bytes]
    pieces: list[int]
    ends: bool


class ScriptedEngine:
    """Has what the calls use of `AsyncEngine`; the real `Generation` puts the text together."""

    max_model_len = 4096
    vocab_size = VOCAB_SIZE
    config = SimpleNamespace(max_logprobs=20)

    def __init__(self, script: Script):
        self.tokenizer = ByteTokenizer()
        self._script = script
        self._inputs = InputProcessor(
            self.tokenizer, max_model_len=4096, vocab_size=VOCAB_SIZE, max_logprobs=20
        )

    async def encode(self, text: str, **options: Any) -> list[int]:
        return self._inputs.encode(text, **options)

    async def chat_prompt(self, messages: Any, **template: Any) -> Any:
        return self._inputs.chat_prompt(messages, **template)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        prepared = self._inputs.prepare(request_id, prompt, params)
        generation = Generation(prepared, self.tokenizer, delta=True)
        left = [[*reply] + [EOS] * self._script.ends for reply in self._script.reply]
        pieces = iter(self._script.pieces)
        size = 1
        while not generation.finished:
            size = next(pieces, size)
            for sample in generation.samples:
                tokens = left[sample.index]
                if sample.finish_reason is not None:
                    continue
                now, left[sample.index] = tokens[:size], tokens[size:]
                generation.push(sample, self._output(now, tokens[size:]), now=0.0)
            output = generation.take()
            if output is not None:
                yield output

    def _output(self, now: list[int], rest: list[int]) -> TokenOutput:
        reason = FinishReason.STOP if self._script.ends else FinishReason.LENGTH
        entries = tuple(
            TokenLogprobs(logprob=-i / 7, rank=1, top_token_ids=(i,), top_logprobs=(-i / 7,))
            for i in now
        )
        return TokenOutput("", tuple(now), entries, finish_reason=None if rest else reason)


def answer(kind: type[Call], body: dict[str, Any], script: Script) -> str:
    """Return the body of the response."""
    model = ServedModel(
        name="tiny",
        engine=ScriptedEngine(script),
        generation_config={},
        fingerprint="fp",
        created=0,
    )
    sent: list[bytes] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # the client stays
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        call = kind(
            body=kind.schema.model_validate(body),
            model=model,
            metrics=SimpleNamespace(on_params=lambda n: None),
            options=ServerOptions(),
            receive=receive,
            request_id="r",
            created=0,
        )
        response = await call.respond()
        await response({"type": "http", "state": {}}, receive, send)

    asyncio.run(run())
    return b"".join(sent).decode()


def streamed(kind: type[Call], body: dict[str, Any], script: Script) -> list[dict[str, Any]]:
    events = events_of(answer(kind, {**body, "stream": True}, script))
    return [json.loads(data) for _, data in events if data != "[DONE]"]


def whole(kind: type[Call], body: dict[str, Any], script: Script) -> dict[str, Any]:
    at_once = Script(reply=script.reply, pieces=[10_000], ends=script.ends)
    return json.loads(answer(kind, body, at_once))


texts = st.one_of(
    st.binary(min_size=1, max_size=24),
    st.text(min_size=1, max_size=8).map(str.encode),
    st.sampled_from(["Grüße, Wörld! 🌍🚀 日本語", "aaab ab", "�a"]).map(str.encode),
)
scripts = st.builds(
    Script,
    reply=st.lists(texts, min_size=2, max_size=2),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    ends=st.booleans(),
)
stops = st.lists(st.sampled_from(STOPS), max_size=2)
examples = settings(max_examples=100)


@examples
@given(scripts, stops, st.booleans())
def test_completions(script, stop, echo):
    body = {
        "prompt": "Hü",
        "stop": stop,
        "echo": echo,
        "n": 2,
        "seed": 1,
        "max_tokens": 100,
        "logprobs": 1,
        "return_token_ids": True,
    }
    if echo:
        body.pop("logprobs")
    joined: dict[int, dict[str, Any]] = {}
    for chunk in streamed(CompletionCall, body, script):
        [choice] = chunk["choices"]
        so_far = joined.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": []})
        so_far["text"] += choice["text"]
        so_far["token_ids"] += choice["token_ids"]
        so_far["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
        so_far["end"] = (choice["finish_reason"], choice["stop_reason"])
    for choice in whole(CompletionCall, body, script)["choices"]:
        so_far = joined[choice["index"]]
        assert so_far["text"] == choice["text"]
        assert so_far["token_ids"] == choice["token_ids"]
        assert so_far["logprobs"] == (choice["logprobs"] or {}).get("token_logprobs", [])
        assert so_far["end"] == (choice["finish_reason"], choice["stop_reason"])


@examples
@given(scripts, stops)
def test_chat(script, stop):
    body = {"messages": MESSAGES, "stop": stop, "n": 2, "seed": 1, "logprobs": True}
    joined: dict[int, dict[str, Any]] = {}
    for chunk in streamed(ChatCall, body, script):
        [choice] = chunk["choices"]
        so_far = joined.setdefault(choice["index"], {"text": "", "logprobs": []})
        so_far["text"] += choice["delta"].get("content", "")
        so_far["logprobs"] += (choice.get("logprobs") or {}).get("content", [])
        so_far["end"] = (choice["finish_reason"], choice.get("stop_reason"))
    for choice in whole(ChatCall, body, script)["choices"]:
        so_far = joined[choice["index"]]
        assert so_far["text"] == choice["message"]["content"]
        assert so_far["logprobs"] == choice["logprobs"]["content"]
        assert so_far["end"] == (choice["finish_reason"], choice["stop_reason"])


@examples
@given(scripts, stops)
def test_responses(script, stop):
    body = {"input": "Hi", "stop": stop, "include": ["message.output_text.logprobs"]}
    events = streamed(ResponseCall, body, script)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    expected, last = whole(ResponseCall, body, script), events[-1]["response"]
    [item] = expected["output"]
    [part] = item["content"]
    assert "".join(delta["delta"] for delta in deltas) == part["text"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == part["logprobs"]
    for answered in (expected, last):
        for moving in ("timings", "completed_at"):
            answered.pop(moving)
    assert last == expected


@examples
@given(scripts, stops)
def test_messages(script, stop):
    body = {"messages": MESSAGES, "stop_sequences": stop, "max_tokens": 100}
    events = streamed(MessagesCall, body, script)
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    expected = whole(MessagesCall, body, script)
    assert "".join(deltas) == "".join(block["text"] for block in expected["content"])
    assert bool(deltas) == bool(expected["content"])
    [last] = [event for event in events if event["type"] == "message_delta"]
    assert last["usage"] == expected["usage"]
    for name in ("stop_reason", "stop_sequence"):
        assert last["delta"][name] == expected[name]


def test_the_examples_cut_inside_characters_and_stop_strings():
    script = Script(reply=["Grüße 🌍 Wörld".encode()] * 2, pieces=[1], ends=True)
    body = {"prompt": "Hi", "stop": ["Wör"], "max_tokens": 100}
    parts = [c["choices"][0]["text"] for c in streamed(CompletionCall, body, script)]
    assert len(parts) > 5 and "".join(parts) == "Grüße 🌍 "


@pytest.mark.parametrize("kind", [CompletionCall, ChatCall, ResponseCall, MessagesCall])
def test_every_dialect_that_streams_is_here(kind):
    from jaxinfer.server.endpoints import ENDPOINTS

    assert kind in {e.call for e in ENDPOINTS if e.streams}
    assert sum(e.streams for e in ENDPOINTS) == 4


def test_a_batch_of_short_texts_lets_others_run_in_between():
    """Each is encoded on the event loop, so a thousand in a row would stop every stream."""

    async def run() -> tuple[int, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        call = CompletionCall(
            body=CompletionCall.schema.model_validate({"prompt": ["a"] * 500}),
            model=SimpleNamespace(engine=ScriptedEngine(Script([], [], True))),
            metrics=SimpleNamespace(),
            options=ServerOptions(),
            receive=None,
            request_id="r",
        )
        other = asyncio.create_task(tick())
        encoded = await call.encode_prompts(
            call.body.prompt, add_special_tokens=True, truncation=None
        )
        other.cancel()
        return len(encoded), ticks

    num_encoded, ticks = asyncio.run(run())
    assert num_encoded == 500 and ticks > 400
