"""Whatever a client sends gets a status and names the field, and the next request works."""

from __future__ import annotations

import inspect
import json
import socket

import openai
import pytest

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.chat_template import ChatTemplate
from jaxinfer.errors import InvalidRequestError
from jaxinfer.input_processor import InputProcessor
from jaxinfer.server.body import MAX_VALUES, parse_json_object
from jaxinfer.server.call import Call
from jaxinfer.server.options import ServerOptions
from jaxinfer.tokenizer import Tokenizer
from tests.server.fakes import NAME, POISON
from tests.server.serving import TIMEOUT_S, running_server

pytestmark = pytest.mark.timeout(60)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]

BAD_COMPLETIONS = [
    # (what is added to an ordinary body, the field that the error names)
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], 2]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": [65] * 600}, "prompt"),
    ({"prompt": "a" * 600}, "prompt"),
    ({"prompt": "a" * 6_000_000}, "prompt"),
    ({"prompt": [300] * 600_000}, "prompt"),
    ({"prompt": [[65], [65] * 600]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": 2**70 // 1000}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": "2"}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 40.0}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"seed": 1.0}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**64)}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": 1}, "stop"),
    ({"stop": "x" * 1_000_000}, "stop"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [260]}, "stop_token_ids"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"bad_words": "no"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["no"] * 1025}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"stop_token_ids": [65] * 1025}, "stop_token_ids"),
    ({"allowed_token_ids": [65] * (2**19 + 1)}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [260]}, "allowed_token_ids"),
    ({"logit_bias": {"AI": -100}}, "logit_bias"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias"),
    ({"logit_bias": {"١": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "2"}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"logit_bias": {"1": [1]}}, "logit_bias"),
    ({"logit_bias": [1, 1]}, "logit_bias"),
    ({"logit_bias": [[1, 1, 1]]}, "logit_bias"),
    ({"logit_bias": [["Hi", 1]]}, "logit_bias"),
    ({"logit_bias": [[1, False]]}, "logit_bias"),
    ({"logit_bias": [[True, 1]]}, "logit_bias"),
    ({"logit_bias": [[-1, 1]]}, "logit_bias"),
    ({"logit_bias": [[1, 1], [1, 2]]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ({"allowed_token_ids": [65], "bad_words": ["A"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [257], "min_tokens": 2}, "allowed_token_ids"),
    ({"prompt": ["a"] * 1000, "n": 9}, "n"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1000}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": True}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"echo": "true"}, "echo"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"priority": 1}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"request_id": "a\r\nX: y"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 1000}, "request_id"),
    ({"model": 5}, "model"),
    ({"suffix": "end"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    ({"logprob_token_ids": [260], "logprobs": 1}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 129, "logprobs": 1}, "logprob_token_ids"),
    ({"sse_ping_interval": "often"}, "sse_ping_interval"),
    ({"n_cmpl": 0}, "n_cmpl"),
    ({"n_cmpl": 2, "n": 3}, "n_cmpl"),
    ({"n_probs": 21}, "n_probs"),
    ({"repeat_penalty": 1.3}, "repeat_penalty"),
    ({"repeat_penalty": -1.0, "repeat_last_n": -1}, "repeat_penalty"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 2}, "max_completion_tokens"),
    ({"n_predict": 7, "max_tokens": 8}, "n_predict"),
    ({"n_predict": -2}, "n_predict"),
    ({"n_predict": 0}, "n_predict"),
    ({"n_predict": 10_000}, "n_predict"),
    ({"grammar": 'root ::= "a"'}, "grammar"),
    ({"store": True}, "store"),
]

BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": MESSAGES * 10_001}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 600_000}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 1000}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 1000, "max_tokens": 5}, "max_completion_tokens"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {"continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
    ),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"audio": {"voice": "a"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"stop": ["x" * 1_000_000]}, "stop"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
]


def name_of(case: tuple[dict, str]) -> str:
    return repr(case[0])[:60]


def assert_error(response, status: int, param: str | None) -> dict:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (status, param)
    assert error["message"] and len(response.text) < 2000
    for leak in ("Traceback", ".py", "/work", "site-packages", "pydantic", "Error:", "object at"):
        assert leak not in error["message"]
    assert response.headers["X-Request-Id"]
    return error


@pytest.mark.parametrize("case", BAD_COMPLETIONS, ids=map(name_of, BAD_COMPLETIONS))
def test_bad_completion_is_a_400_that_names_the_field(server, case):
    added, param = case
    response = server.post(COMPLETIONS, {"model": NAME, "prompt": "Hi", **added})
    assert_error(response, 400, param)
    server.assert_works()


@pytest.mark.parametrize("case", BAD_CHATS, ids=map(name_of, BAD_CHATS))
def test_bad_chat_is_a_400_that_names_the_field(server, case):
    added, param = case
    response = server.post(CHAT, {"model": NAME, "messages": MESSAGES, **added})
    assert_error(response, 400, param)
    server.assert_works()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {"prompt": "Hi", "n_cmpl": 0}, "n_cmpl must be in [1, 128], got 0"),
        (
            COMPLETIONS,
            {"prompt": ["a"] * 1000, "n_cmpl": 9},
            "n_cmpl: at most 8192 choices a request, got 9000 for 1000 prompts; send fewer prompts "
            "at once or lower n_cmpl",
        ),
        (COMPLETIONS, {"prompt": "Hi", "n_probs": 99}, "n_probs must be in [0, 20], got 99"),
        (
            "/v1/embeddings",
            {"input": [[999]]},
            "input: token id 999 at position 0 is outside the vocabulary of 260",
        ),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 5, "stop_sequences": [""]},
            "stop_sequences must hold non-empty strings, got ''",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "max_output_tokens": 600},
            "This model's maximum context length is 512 tokens. However, you requested 620 tokens "
            "(20 in the prompt, 600 in the output). Shorten the prompt or lower max_output_tokens "
            "to 492.",
        ),
    ],
)
def test_a_message_names_the_clients_field_and_leaves_other_words_alone(
    server, path, body, message
):
    response = server.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


ON_THE_WAY_OF_A_CHAT = (
    Call.encode_chat,
    AsyncEngine.chat_prompt,
    InputProcessor.chat_prompt,
    InputProcessor.encode,
    Tokenizer.render_chat,
    ChatTemplate.render,
)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/tokenize"])
def test_template_variables_cannot_stand_for_arguments_of_the_rendering(server, path):
    body = {"/v1/responses": {"input": "Hi"}, "/v1/messages": {"max_tokens": 5}}.get(path, {})
    names = {n for f in ON_THE_WAY_OF_A_CHAT for n in inspect.signature(f).parameters}
    variadic = {"template", "kwargs"}
    positional = {"text"}  # each caller gives it by its place, beside no variables
    for name in sorted(names):
        variables = {"chat_template_kwargs": {name: True}}
        response = server.post(path, {"messages": MESSAGES, **body, **variables})
        if name in variadic | positional:
            assert response.status_code == 200, (name, response.text)
        else:
            assert response.status_code == 400, (name, response.text)
            assert "chat_template_kwargs" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b"5",
        b"{'prompt': 'Hi'}",
        b'{"prompt": "Hi",}',
        b'{"prompt": "Hi", "temperature": NaN}',
        b'{"prompt": "Hi", "temperature": -Infinity}',
        b'{"prompt": "Hi", "temperature": 1e999}',
        b'{"prompt": "Hi", "seed": ' + b"9" * 30 + b"}",
        b'{"prompt": "Hi", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "Hi", "prompt": "Ho"}',
        b'{"\\ud800": 1, "\\ud800": 2}',
        b'{"prompt": "Hi", "logit_bias": {"1": 1, "1": 2}}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": ["a", "\\udc00"]}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"prompt": "Hi", "x\\ud83d": 1}',
        b'{"prompt": "a\tb"}',
        b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
        b'{"messages": ' + b'{"a": ' * 70 + b"1" + b"}" * 71,
        b"[" * 1_000_000,
        b"\x00" * 100,
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda b: repr(b[:40]),
)
def test_what_is_no_strict_json_object_is_a_400(server, path, body):
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "BadRequestError"
    server.assert_works()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"temperature": NaN', "temperature"),
        (b'"temperature": -Infinity', "temperature"),
        (b'"top_p": 1e999', "top_p"),
        (b'"seed": -' + b"9" * 30, "seed"),
        (b'"stop_token_ids": [1, NaN]', "stop_token_ids"),
        (b'"logit_bias": {"1": Infinity}', "logit_bias"),
        (b'"logit_bias": {"1": 1, "1": 2}', "logit_bias"),
        (b'"n": 1, "n": 2', "n"),
        (b'"stop": ["a", "\\ud83d"]', "stop"),
        (b'"user": ' + b"[" * 70 + b"]" * 70, "user"),
    ],
)
def test_what_is_no_strict_json_value_is_named_by_its_field(server, fields, param):
    response = server.post(COMPLETIONS, b'{"prompt": "Hi", ' + fields + b"}")
    assert_error(response, 400, param)
    server.assert_works()


@pytest.mark.parametrize("unit", [b"[]", b'{"a":0}', b'","'])
def test_a_body_of_more_values_than_anybody_needs_is_refused_unread(server, unit):
    raw = b'{"prompt": "Hi", "x": [' + b",".join([unit] * (MAX_VALUES + 1)) + b"]}"
    assert "values" in assert_error(server.post(COMPLETIONS, raw), 400, None)["message"]
    server.assert_works()


@pytest.mark.parametrize("text", ["[{,", '\\"[,', '\\\\\\"{,', ",[\n"])
def test_marks_inside_strings_are_no_values(text):
    raw = json.dumps({"prompt": text * MAX_VALUES, "n": [1, 2]}).encode()
    assert parse_json_object(raw)["prompt"] == text * MAX_VALUES
    # As fast without an end: at each quote, a scan to the end would be one for each quote.
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_json_object(raw[: -len('", "n": [1, 2]}')])


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_content_types_are_a_400(server, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    response = server.http.post(COMPLETIONS, content=b'{"prompt": "Hi"}', headers=headers)
    error = assert_error(response, 400, None)
    assert "Unsupported Media Type" in error["message"]


def test_content_type_may_have_parameters_and_any_case(server):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = server.http.post(COMPLETIONS, content=b'{"prompt": "Hi"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})],
)
def test_unknown_model_is_a_404(server, path, body):
    error = assert_error(server.post(path, {**body, "model": "gpt-4"}), 404, "model")
    assert error["type"] == "NotFoundError" and NAME in error["message"]
    assert_error(server.http.get("/v1/models/gpt-4"), 404, "model")
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="gpt-4", prompt="Hi")


def test_unknown_paths_and_methods_have_the_same_error_body(server):
    assert_error(server.http.get("/v1/nothing"), 404, None)
    assert_error(server.http.get("/nothing"), 404, None)
    assert_error(server.post(COMPLETIONS + "/", {"prompt": "Hi"}), 404, None)
    response = server.http.get(COMPLETIONS)
    assert_error(response, 405, None)
    assert response.headers["Allow"] == "POST"
    assert_error(server.http.delete("/v1/models"), 405, None)


def test_client_exceptions_carry_the_field(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model=NAME, prompt="Hi", temperature=-1)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_no_numbers_end_that_request_only(server, stream):
    body = {"prompt": [65, POISON], "stream": stream}
    error = assert_error(server.post(COMPLETIONS, body), 500, None)
    assert error["type"] == "InternalServerError"
    server.assert_works()
    assert server.series()["vllm:corrupted_requests_total"] >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_of_a_batch_is_a_clean_status_and_aborts_the_others(server, stream):
    prompts = [[65], [65, 66], [260], [67]]
    response = server.post(COMPLETIONS, {"prompt": prompts, "stream": stream, "max_tokens": 50})
    assert_error(response, 400, "prompt")
    server.assert_idle()


def test_full_queue_is_a_503_with_retry_after(own_server):
    own_server.load(max_num_seqs=1, max_waiting=1)
    response = own_server.post(COMPLETIONS, {"prompt": ["a"] * 50, "max_tokens": 100})
    assert_error(response, 503, None)
    assert int(response.headers["Retry-After"]) >= 1
    own_server.assert_idle()
    own_server.assert_works()


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_is_a_413(chunked):
    with running_server(ServerOptions(max_body_bytes=10_000)) as server:
        server.load()
        raw = json.dumps({"prompt": "a" * 200_000}).encode()
        content = iter([raw[:100], raw[100:]]) if chunked else raw
        headers = {"Content-Type": "application/json"}
        response = server.http.post(COMPLETIONS, content=content, headers=headers)
        error = assert_error(response, 413, None)
        assert "10000" in error["message"]
        server.assert_works()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
        b"Content-Type: application/json\r\n\r\n{",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["no path", "tls", "negative length", "half a body", "long path"],
)
def test_broken_http_and_half_sent_bodies_hurt_nobody(server, raw):
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(raw)
    server.assert_works()
    server.assert_idle()


def test_neutral_values_and_ignored_fields_are_accepted(server):
    neutral = {
        "suffix": None,
        "best_of": 1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "response_format": {"type": "text"},
        "tools": None,
        "tool_choice": "none",
        "store": False,
        "service_tier": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "mirostat": 0,
        "repeat_penalty": 1.0,
        "something_new": {"x": [1]},
    }
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})):
        response = server.post(path, {**body, **neutral})
        assert response.status_code == 200, response.text
