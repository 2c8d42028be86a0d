"""Every request field that OpenAI, vLLM and llama.cpp know is implemented, refused or ignored."""

from __future__ import annotations

import pytest

from jaxinfer.errors import InvalidRequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.fields import (
    CHAT,
    COMPLETIONS,
    FIELDS,
    Refused,
    UnknownFieldLog,
    refuse_unsupported,
)
from jaxinfer.server.protocol import ChatCompletionRequest, CompletionRequest

SAMPLING = """
n temperature top_p seed presence_penalty frequency_penalty stop logit_bias stream stream_options
user use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids
bad_words add_special_tokens response_format structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
repetition_detection thinking_token_budget stream_interval model max_tokens logprobs echo
"""
KNOWN = {
    COMPLETIONS: f"{SAMPLING} prompt best_of suffix prompt_embeds",
    CHAT: f"""{SAMPLING} messages max_completion_tokens top_logprobs tools tool_choice
    parallel_tool_calls reasoning_effort include_reasoning add_generation_prompt
    continue_final_message documents chat_template chat_template_kwargs mm_processor_kwargs
    media_io_kwargs return_prompt_text functions function_call audio modalities prediction metadata
    store service_tier web_search_options verbosity prompt_cache_key safety_identifier""",
}
LLAMA_CPP = """
n_predict n_cmpl cache_prompt id_slot n_probs min_keep samplers repeat_penalty repeat_last_n
typical_p dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta dynatemp_range dynatemp_exponent
grammar json_schema t_max_predict_ms n_keep return_tokens timings_per_token return_progress
post_sampling_probs response_fields lora sse_ping_interval reasoning_format
"""
SCHEMAS = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_every_known_field_has_exactly_one_fate(endpoint):
    implemented = set(SCHEMAS[endpoint].model_fields)
    elsewhere = {name for name, rule in FIELDS.items() if endpoint in rule.endpoints}
    assert not implemented & elsewhere
    assert not set((KNOWN[endpoint] + LLAMA_CPP).split()) - implemented - elsewhere


def test_every_sampling_parameter_is_a_field_of_both_endpoints():
    # Made by the front end from `bad_words`, and always on.
    internal = {"bad_words_token_ids", "detokenize"}
    for schema in SCHEMAS.values():
        assert not set(SamplingParams.__dataclass_fields__) - internal - set(schema.model_fields)


@pytest.mark.parametrize("name", [n for n, rule in FIELDS.items() if isinstance(rule, Refused)])
def test_refused_field_is_named_and_its_neutral_values_pass(name):
    rule = FIELDS[name]
    for endpoint in rule.endpoints:
        for value in (None, *rule.neutral):
            refuse_unsupported({name: value}, endpoint)
        with pytest.raises(InvalidRequestError, match=name) as caught:
            refuse_unsupported({name: "surely not neutral"}, endpoint)
        assert caught.value.param == name
    assert name not in CompletionRequest.model_fields or COMPLETIONS not in rule.endpoints


def test_true_is_not_taken_for_one():
    with pytest.raises(InvalidRequestError):
        refuse_unsupported({"mirostat": False}, COMPLETIONS)


def test_unknown_fields_are_logged_once_and_not_without_end():
    lines = []
    log = UnknownFieldLog(warn=lambda text, *args: lines.append(text % args))
    body = {"brand_new": 1, "prompt": "Hi", "user": "me"}
    for _ in range(3):
        log.note(body, CompletionRequest.model_fields)
    assert lines == ["ignoring the unknown request field 'brand_new'"]
    log.note({f"x{i}": 1 for i in range(1000)}, CompletionRequest.model_fields)
    log.note({"y" * 10_000: 1}, CompletionRequest.model_fields)
    assert len(lines) == UnknownFieldLog.MAX_NAMES and all(len(line) < 200 for line in lines)
