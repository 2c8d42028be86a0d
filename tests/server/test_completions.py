"""`/v1/completions` through the real OpenAI client and raw."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.fakes import BOS, NAME, REPLY
from tests.server.serving import RunningServer

pytestmark = pytest.mark.timeout(60)
PATH = "/v1/completions"


def ask(server: RunningServer, **body) -> dict:
    response = server.post(PATH, {"prompt": "Hi", "temperature": 0, "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: RunningServer, **body) -> list[dict]:
    events = server.events(PATH, {"prompt": "Hi", "temperature": 0, "max_tokens": 100, **body})
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_client_gets_text_usage_and_ids(server):
    answer = server.client.completions.create(
        model=NAME, prompt="Hi", temperature=0, max_tokens=100
    )
    assert answer.object == "text_completion" and answer.model == NAME
    assert answer.id.startswith("cmpl-") and answer.system_fingerprint.startswith("fp_")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (REPLY, "stop")
    num_tokens = len(REPLY.encode()) + 1
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, num_tokens)
    assert usage.total_tokens == 3 + num_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_cached_prompt_tokens_are_told(server):
    prompt = list(range(40, 90))
    ask(server, prompt=prompt)
    usage = ask(server, prompt=prompt)["usage"]
    assert usage["prompt_tokens"] == 50
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48


@pytest.mark.parametrize("length", [1, 2, 5, 17, 100])
def test_streamed_text_equals_non_streamed(server, length):
    whole = ask(server, max_tokens=length)
    parts = chunks(server, max_tokens=length)
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert len({(part["id"], part["created"]) for part in parts}) == 1
    # Completions chunks carry all fields.
    assert all(part["usage"] is None for part in parts)


@pytest.mark.parametrize("stop", ["Wörld", ["🚀", "never"], "ö", "ok.", ", W"])
@pytest.mark.parametrize("included", [False, True])
def test_stop_string_cuts_streamed_and_whole_text_alike(server, stop, included):
    first = stop if isinstance(stop, str) else stop[0]
    options = {"stop": stop, "include_stop_str_in_output": included}
    [choice] = ask(server, **options)["choices"]
    expected = REPLY[: REPLY.index(first) + len(first) * included]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    assert choice["stop_reason"] == first
    parts = chunks(server, **options)
    assert "".join(part["choices"][0]["text"] for part in parts) == expected
    assert parts[-1]["choices"][0]["stop_reason"] == first


def test_stop_token_is_the_stop_reason(server):
    [choice] = ask(server, stop_token_ids=[ord(",")])["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("Grüße", ord(","))


def test_usage_chunk_ends_the_stream_when_asked_for(server):
    stream = server.client.completions.create(
        model=NAME,
        prompt=["Hi", "Ho"],
        n=2,
        seed=3,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = list(stream)
    assert last.choices == [] and all(part.usage is None for part in parts)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 16)


def test_continuous_usage_grows_to_the_final_usage(own_server):
    own_server.runner.step_s = 0.002
    own_server.load()
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = chunks(own_server, stream_options=options)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and counts[0] < counts[-1] == len(REPLY.encode()) + 1


def test_batched_prompts_and_samples_are_numbered_prompt_by_prompt(server):
    prompts = ["a", "b", "c"]
    both = ask(server, prompt=prompts, n=2, temperature=1.0, seed=5)["choices"]
    assert [choice["index"] for choice in both] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = ask(server, prompt=prompt, n=2, temperature=1.0, seed=5)["choices"]
        assert [c["text"] for c in both[2 * i : 2 * i + 2]] == [c["text"] for c in alone]
    first_only = ask(server, prompt="a", temperature=1.0, seed=5)["choices"]
    assert first_only[0]["text"] == both[0]["text"]


def test_batched_stream_joins_to_the_non_streamed_choices(server):
    options = {"prompt": ["a", "b"], "n": 2, "temperature": 1.0, "seed": 5}
    texts = [""] * 4
    for part in chunks(server, **options):
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert texts == [choice["text"] for choice in ask(server, **options)["choices"]]


@pytest.mark.parametrize(
    "prompt", ["Hi", ["Hi"], [BOS, 72, 105], [[BOS, 72, 105]]], ids=lambda p: str(p)[:20]
)
def test_prompt_forms_run_the_same_tokens(server, prompt):
    [choice] = ask(server, prompt=prompt, return_token_ids=True, max_tokens=3)["choices"]
    assert choice["prompt_token_ids"] == [BOS, 72, 105]
    assert choice["token_ids"] == list("Grü".encode())[:3]


def test_add_special_tokens_false_leaves_out_bos(server):
    answer = ask(server, add_special_tokens=False, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == [72, 105]


@pytest.mark.parametrize("prompt", ["Hi", [72, 105]])
def test_echo_starts_with_the_prompt(server, prompt):
    assert ask(server, prompt=prompt, echo=True)["choices"][0]["text"] == "Hi" + REPLY
    texts = [part["choices"][0]["text"] for part in chunks(server, prompt=prompt, echo=True)]
    assert texts[0].startswith("Hi") and "".join(texts) == "Hi" + REPLY


def test_echo_without_new_tokens_returns_the_prompt_only(server):
    answer = ask(server, echo=True, max_tokens=0, logprobs=1)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0


def test_logprobs_have_the_completions_shape(server):
    [choice] = ask(server, max_tokens=3, logprobs=3)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["G", "r", "�"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    # JSON has no infinities.
    assert logprobs["top_logprobs"][0] == {"H": -0.25, "G": -0.5, "I": -9999.0}


def test_zero_logprobs_give_the_sampled_token_only(server):
    [choice] = ask(server, max_tokens=2, logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"G": -0.5}, {"r": -0.5}]


def test_echoed_logprobs_are_what_lm_eval_reads(server):
    body = {"prompt": [[72, 105, 33]], "echo": True, "max_tokens": 1, "logprobs": 1}
    [choice] = ask(server, **body)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["H", "i", "!", "G"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert max(logprobs["top_logprobs"][1].values()) == -0.25  # not greedy: "j" is likelier
    assert logprobs["text_offset"] == [0, 1, 2, 3]


def test_streamed_logprobs_join_to_the_non_streamed(server):
    options = {"logprobs": 2, "echo": True, "n": 2, "temperature": 1.0, "seed": 1}
    joined = [{"tokens": [], "token_logprobs": [], "top_logprobs": []} for _ in range(2)]
    for part in chunks(server, **options):
        [choice] = part["choices"]
        for name, values in joined[choice["index"]].items():
            values += choice["logprobs"][name]
    for choice in ask(server, **options)["choices"]:
        for name, values in joined[choice["index"]].items():
            assert values == choice["logprobs"][name]


@pytest.mark.parametrize("prompt", ["¡é", [BOS, 194, 161, 195, 169], [194, 161, 256, 195, 169]])
def test_text_offsets_point_into_the_returned_text(server, prompt):
    options = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 40}
    [choice] = ask(server, **options)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    text = choice["text"].encode()
    # Each byte is a token; special tokens have no text here.
    start = 0
    for token, offset in zip(choice["logprobs"]["tokens"], offsets, strict=True):
        if token.startswith("<"):
            continue
        assert offset == len(text[:start].decode(errors="ignore"))
        start += 1
    streamed = chunks(server, **options)
    assert offsets == [o for c in streamed for o in c["choices"][0]["logprobs"]["text_offset"]]


def test_tokens_can_be_spelled_as_ids(server):
    options = {"max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    [choice] = ask(server, **options)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:71", "token_id:114"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:71": -0.5, "token_id:72": -0.25}


def test_prompt_logprobs_stand_on_the_choice(server):
    [choice] = ask(server, prompt=[72, 105], prompt_logprobs=2)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["105"] == {"logprob": -0.5, "rank": 2, "decoded_token": "i"}
    assert second["106"] == {"logprob": -0.25, "rank": 1, "decoded_token": "j"}


def test_streamed_token_ids_join_to_all_tokens(server):
    parts = chunks(server, return_token_ids=True)
    ids = [i for part in parts for i in part["choices"][0]["token_ids"]]
    assert ids == [*REPLY.encode(), 257]
    assert parts[0]["choices"][0]["prompt_token_ids"] == [BOS, 72, 105]
    assert all(part["choices"][0]["prompt_token_ids"] is None for part in parts[1:])


def test_every_sampling_field_reaches_the_engine(server):
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "allowed_token_ids": [71, 114, 5],
        "max_tokens": 7,
        "min_tokens": 2,
        "logprobs": 4,
        "prompt_logprobs": 3,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    seen = set(server.runner.requests)
    ask(server, **fields, seed=-9, stop=["x"], bad_words=["no"], logit_bias={"5": 200, "6": -1})
    [name] = set(server.runner.requests) - seen
    request = server.runner.requests[name]
    params = request.params
    assert {k: getattr(params, k) for k in fields} == {
        **fields,
        "stop_token_ids": (3,),
        "allowed_token_ids": (71, 114, 5),
    }
    assert params.stop == ("x",) and params.bad_words_token_ids == ((110, 111),)
    assert params.logit_bias == {5: 100.0, 6: -1.0}


def test_seed_repeats_and_no_seed_varies(server):
    def draw(**body) -> str:
        options = {"temperature": 1.0, "n": 8, "max_tokens": 4, **body}
        return str([choice["text"] for choice in ask(server, **options)["choices"]])

    assert draw(seed=11) == draw(seed=11) != draw(seed=12)
    assert draw() != draw()
    assert draw(seed=-1) != draw(seed=-1)  # no seed, as llama.cpp's clients say it


def test_null_means_the_default(server):
    nulls = ("n", "stop", "seed", "logprobs", "logit_bias", "stream", "stream_options", "echo")
    answer = ask(server, **dict.fromkeys([*nulls, "max_tokens", "top_p", "model", "user"]))
    # 16 is the default of `max_tokens`.
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["model"] == NAME


def test_default_max_tokens_shrinks_to_the_context_but_an_explicit_one_is_refused(server):
    prompt = [65] * 505
    assert ask(server, prompt=prompt, max_tokens=None)["usage"]["completion_tokens"] == 7
    response = server.post(PATH, {"prompt": prompt, "max_tokens": 16})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "max_tokens" and "maximum context length is 512" in error["message"]


def test_model_defaults_apply_where_the_request_is_silent(own_server):
    own_server.load(generation_config={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    own_server.post(PATH, {"prompt": "Hi", "top_k": 5})
    [request] = own_server.runner.requests.values()
    assert (request.params.temperature, request.params.top_k) == (0.6, 5)
    assert request.params.top_p == 0.95


def test_priority_and_cache_salt_reach_the_engine(own_server):
    own_server.load(scheduling_policy="priority")
    body = {"prompt": "Hi", "priority": -3, "cache_salt": "mine"}
    assert own_server.post(PATH, body).status_code == 200
    [request] = own_server.runner.requests.values()
    assert (request.priority, request.cache_salt) == (-3, "mine")


def test_request_id_comes_from_header_then_body_then_chance(server):
    body = {"prompt": "Hi", "request_id": "from-body"}
    headers = {"X-Request-Id": "from-header"}
    response = server.http.post(PATH, json=body, headers=headers)
    assert response.headers["X-Request-Id"] == "from-header"
    assert response.json()["id"] == "cmpl-from-header"
    assert server.post(PATH, body).headers["X-Request-Id"] == "from-body"
    names = {server.post(PATH, {"prompt": "Hi"}).headers["X-Request-Id"] for _ in range(2)}
    assert len(names) == 2
    bad = server.http.post(PATH, json={"prompt": "Hi"}, headers={"X-Request-Id": "a b" * 99})
    assert " " not in bad.headers["X-Request-Id"]


def test_two_live_requests_may_have_one_request_id(server):
    async def both() -> list:
        async with server.async_client() as client:
            create = client.completions.create
            extra = {"request_id": "twin"}
            calls = (create(model=NAME, prompt="Hi", extra_body=extra) for _ in range(2))
            return await asyncio.gather(*calls)

    assert [answer.id for answer in asyncio.run(both())] == ["cmpl-twin"] * 2


def test_many_concurrent_requests_through_the_async_client(server):
    async def run() -> list[str]:
        async with server.async_client() as client:

            async def one(i: int) -> str:
                kind = {"model": NAME, "prompt": f"{i}", "temperature": 0, "max_tokens": 64}
                if i % 2:
                    answer = await client.completions.create(**kind)
                    return answer.choices[0].text
                stream = await client.completions.create(**kind, stream=True)
                return "".join([part.choices[0].text async for part in stream])

            return await asyncio.gather(*(one(i) for i in range(40)))

    assert asyncio.run(run()) == [REPLY] * 40
    server.assert_idle()
