"""The table of request fields says what becomes of every field that these APIs know."""

from __future__ import annotations

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types import embedding_create_params as openai_embedding
from openai.types.chat import completion_create_params as openai_chat
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import response_create_params as openai_response

from jaxinfer.errors import InvalidRequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.endpoints import ENDPOINTS
from jaxinfer.server.field_table import FATES
from jaxinfer.server.fields import (
    Alias,
    Ignored,
    Implemented,
    Refused,
    UnknownFieldLog,
    translate,
)
from jaxinfer.server.protocol import ChatCompletionRequest, CompletionRequest
from tests.server.serving import RunningServer

SAMPLING = """
n temperature top_p seed presence_penalty frequency_penalty stop logit_bias stream stream_options
user use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids
bad_words add_special_tokens response_format structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
repetition_detection thinking_token_budget stream_interval model max_tokens logprobs echo
"""
POOLING = """
model user truncate_prompt_tokens truncation_side request_id priority cache_salt
mm_processor_kwargs add_special_tokens use_activation chat_template chat_template_kwargs
"""
TEMPLATE = """
messages add_generation_prompt continue_final_message chat_template chat_template_kwargs tools
mm_processor_kwargs media_io_kwargs
"""
LLAMA_CPP = """
n_predict n_cmpl cache_prompt id_slot n_probs min_keep samplers repeat_penalty repeat_last_n
typical_p dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta dynatemp_range dynatemp_exponent
grammar json_schema t_max_predict_ms n_keep return_tokens timings_per_token return_progress
post_sampling_probs response_fields lora sse_ping_interval top_n_sigma adaptive_target
adaptive_decay n_indent n_cache_reuse
"""
# As vLLM and llama.cpp document them.
KNOWN = {
    "completions": f"{SAMPLING} {LLAMA_CPP} prompt best_of suffix prompt_embeds",
    "chat": f"""{SAMPLING} {LLAMA_CPP} {TEMPLATE} reasoning_format reasoning_control
    max_completion_tokens
    top_logprobs tool_choice parallel_tool_calls reasoning_effort include_reasoning documents
    return_prompt_text""",
    "responses": """input instructions max_output_tokens max_tool_calls model metadata include
    background store stream previous_response_id prompt reasoning service_tier temperature top_p
    top_k top_logprobs presence_penalty frequency_penalty repetition_penalty seed stop ignore_eos
    logit_bias text tool_choice tools truncation user prompt_cache_key request_id priority
    cache_salt structured_outputs""",
    "messages": """model messages max_tokens system stop_sequences stream temperature top_p top_k
    tools tool_choice metadata thinking chat_template_kwargs kv_transfer_params""",
    "embeddings": f"""{POOLING} input encoding_format dimensions embed_dtype endianness normalize
    messages add_generation_prompt continue_final_message media_io_kwargs embd_normalize""",
    "score": f"""{POOLING} text_1 text_2 queries documents data_1 data_2 softmax activation
    instruction""",
    "tokenize": f"""{TEMPLATE} model prompt add_special_tokens return_token_strs content
    add_special parse_special with_pieces""",
    "detokenize": "model tokens",
}
# As the clients' own packages declare them, so that a new field is noticed.
DECLARED = {
    "completions": CompletionCreateParamsBase,
    "chat": openai_chat.CompletionCreateParamsBase,
    "responses": openai_response.ResponseCreateParamsBase,
    "embeddings": openai_embedding.EmbeddingCreateParams,
    "messages": MessageCreateParamsBase,
    "count_tokens": MessageCountTokensParams,
}
SCHEMAS = {e.call.schema.endpoint: e.call.schema for e in ENDPOINTS if e.call is not None}
PATHS = {e.call.schema.endpoint: e.path for e in ENDPOINTS if e.call is not None}
MESSAGES = [{"role": "user", "content": "Hi"}]
# The least that each endpoint answers.
LEAST = {
    "completions": {"prompt": "Hi"},
    "chat": {"messages": MESSAGES},
    "render": {"messages": MESSAGES},
    "responses": {"input": "Hi"},
    "messages": {"messages": MESSAGES, "max_tokens": 5},
    "count_tokens": {"messages": MESSAGES},
    "embeddings": {"input": "Hi"},
    "score": {"text_1": "Hi", "text_2": "Ho"},
    "tokenize": {"prompt": "Hi"},
    "detokenize": {"tokens": [72]},
}
ROWS = [(e, name) for e, fates in FATES.items() for name in fates]


def rows(kind: type) -> list[tuple[str, str]]:
    return [(e, name) for e, name in ROWS if isinstance(FATES[e][name], kind)]


@pytest.mark.parametrize("endpoint", FATES)
def test_what_the_table_calls_implemented_is_what_the_schema_takes(endpoint):
    implemented = {n for n, f in FATES[endpoint].items() if isinstance(f, Implemented)}
    assert implemented == set(SCHEMAS[endpoint].model_fields)
    assert set(SCHEMAS) == set(FATES) == set(LEAST)


@pytest.mark.parametrize("endpoint", KNOWN)
def test_every_field_that_vllm_and_llama_cpp_document_has_a_row(endpoint):
    assert not set(KNOWN[endpoint].split()) - set(FATES[endpoint])


@pytest.mark.parametrize("endpoint", DECLARED)
def test_every_field_that_the_clients_declare_has_a_row(endpoint):
    assert len(DECLARED[endpoint].__annotations__) > 4
    assert not set(DECLARED[endpoint].__annotations__) - set(FATES[endpoint])


def test_every_sampling_parameter_is_a_field_of_both_endpoints():
    # Made by the front end from `bad_words`; always on; what `LLM.score` uses; functions.
    internal = {"bad_words_token_ids", "detokenize", "prompt_logprobs_start", "logits_processors"}
    for schema in (CompletionRequest, ChatCompletionRequest):
        assert not set(SamplingParams.__dataclass_fields__) - internal - set(schema.model_fields)


@pytest.mark.parametrize(("endpoint", "name"), rows(Refused))
def test_refused_field_is_named_and_its_neutral_values_pass(endpoint, name):
    fate = FATES[endpoint][name]
    for value in (None, *fate.neutral):
        translate({name: value}, FATES[endpoint])
    with pytest.raises(InvalidRequestError, match=name) as caught:
        translate({name: "surely not neutral"}, FATES[endpoint])
    assert caught.value.param == name


@pytest.mark.parametrize(("endpoint", "name"), rows(Alias))
def test_alias_stands_for_an_implemented_field(endpoint, name):
    fate = FATES[endpoint][name]
    assert isinstance(FATES[endpoint][fate.of], Implemented)
    needed = dict([fate.needs]) if fate.needs else {}
    body, spelled = translate({name: "x", **needed}, FATES[endpoint])
    assert (body[fate.of], spelled) == ("x", {fate.of: name}) and name not in body
    with pytest.raises(InvalidRequestError, match=name):
        translate({name: "x", fate.of: "y", **needed}, FATES[endpoint])


def test_every_row_is_answered_as_it_says(server: RunningServer):
    """Over the wire: refused rows are a 400 that names them, the others never a 5xx."""
    for endpoint, name in ROWS:
        fate, least = FATES[endpoint][name], LEAST[endpoint]
        for value in ("surely not neutral", {"a": 1}, None):
            response = server.post(PATHS[endpoint], {**least, name: value})
            if isinstance(fate, Refused) and value == "surely not neutral":
                assert response.status_code == 400, (endpoint, name, value)
                assert name in response.json()["error"]["message"]
            elif isinstance(fate, Ignored) or (value is None and name not in least):
                assert response.status_code == 200, (endpoint, name, response.text)
            assert response.status_code in (200, 400, 404), (endpoint, name, response.text)
    server.assert_works()
    server.assert_idle()


def test_true_is_not_taken_for_one():
    with pytest.raises(InvalidRequestError):
        translate({"mirostat": False}, FATES["completions"])


def test_unknown_fields_are_logged_once_and_not_without_end():
    lines = []
    log = UnknownFieldLog(warn=lambda text, *args: lines.append(text % args))
    fates = FATES["completions"]
    body = {"brand_new": 1, "prompt": "Hi", "user": "me"}
    for _ in range(3):
        log.note(body, fates)
    assert lines == ["ignoring the unknown request field 'brand_new'"]
    log.note({f"x{i}": 1 for i in range(1000)}, fates)
    log.note({"y" * 10_000: 1}, fates)
    assert len(lines) == UnknownFieldLog.MAX_NAMES and all(len(line) < 200 for line in lines)


def test_openapi_describes_every_field_with_its_fate(server: RunningServer):
    document = server.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for endpoint, fates in FATES.items():
        operation = document["paths"][PATHS[endpoint]]["post"]
        ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        properties = document["components"]["schemas"][ref.rsplit("/", 1)[1]]["properties"]
        assert set(properties) == set(fates)
        assert all(field["description"] for field in properties.values())


def test_docs_page_shows_every_field_and_needs_nothing_from_outside(server: RunningServer):
    response = server.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "http://" not in response.text and "https://" not in response.text
    assert "<script" not in response.text and "src=" not in response.text
    for fates in FATES.values():
        for name in fates:
            assert f"<code>{name}</code>" in response.text
