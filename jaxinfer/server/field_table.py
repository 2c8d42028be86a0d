"""The one table of request fields: a row for each name that OpenAI, vLLM or llama.cpp knows.

`field_table_more` continues it for the endpoints that do not sample from a prompt or a chat, and
for the other dialects. `FATES` is what everybody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.server.field_table_more import ROWS as MORE_ROWS
from jaxinfer.server.field_table_more import SAMPLING, STRUCTURED, TOOLS
from jaxinfer.server.fields import Alias, Fate, Ignored, Implemented, Refused

_SWITCHED_OFF = "only tunes a feature whose own switch is refused"
_BOOKKEEPING = "bookkeeping of the caller's; no answer depends on it"
_HINT_ONLY = "a hint to a hosted service's router or cache; this is one server"
_ONE_ADAPTER = "Only the base model is served."
_PENALTY = "Use repetition_penalty, presence_penalty or frequency_penalty."
_ONLY_TEXT = "Only text is read."

_COMPLETIONS: Mapping[str, Fate] = {
    "prompt": Implemented(
        meaning="A text, a list of texts, a list of token ids, or a list of such lists."
    ),
    "max_tokens": Implemented(
        meaning="Most tokens to produce; 0 with `echo` produces none. Default: 16."
    ),
    "logprobs": Implemented(meaning="Alternatives per token; 0 for the sampled token only."),
    "echo": Implemented(
        meaning="Put the prompt in front of the answer, with `logprobs` also theirs."
    ),
    "add_special_tokens": Implemented(
        meaning="Put the tokenizer's BOS in front of a text. Default: true."
    ),
    "n_probs": Alias(of="logprobs", neutral=(0,)),
    "best_of": Refused(hint="Only best_of equal to n is supported."),
    "suffix": Refused(neutral=("",), hint="Filling in the middle is not supported."),
    "top_logprobs": Refused(neutral=(0,), hint="Here logprobs itself is the number."),
    "max_completion_tokens": Refused(hint="Use max_tokens."),
    "prompt_embeds": Refused(hint="Send text or token ids."),
}

_CHAT: Mapping[str, Fate] = {
    "messages": Implemented(meaning="The conversation: `role` and `content` of each message."),
    "max_tokens": Implemented(meaning="Most tokens to produce. Default: what the context holds."),
    "max_completion_tokens": Implemented(
        meaning="OpenAI's newer name of `max_tokens`; wins over it."
    ),
    "logprobs": Implemented(meaning="Send the log-probabilities of the sampled tokens."),
    "top_logprobs": Implemented(meaning="Alternatives per token; needs `logprobs`."),
    "echo": Implemented(
        meaning="Start the answer with the last message, if that is the assistant's."
    ),
    "add_special_tokens": Implemented(
        meaning="Put the tokenizer's BOS in front. Default: false, the template does it."
    ),
    "add_generation_prompt": Implemented(
        meaning="End the conversation with the start of an answer. Default: true."
    ),
    "continue_final_message": Implemented(
        meaning="Go on with the last message, which is the assistant's; needs "
        "`add_generation_prompt: false`."
    ),
    "chat_template": Implemented(
        meaning="A Jinja template instead of the model's; only if the server trusts requests with "
        "it."
    ),
    "chat_template_kwargs": Implemented(meaning="Variables for the chat template."),
    "n_probs": Refused(neutral=(0,), hint="Use logprobs and top_logprobs."),
    "parallel_tool_calls": Ignored(why=_SWITCHED_OFF),
    "tools": Refused(hint=TOOLS),
    "tool_choice": Refused(neutral=("none",), hint=TOOLS),
    "functions": Refused(hint=TOOLS),
    "function_call": Refused(neutral=("none",), hint=TOOLS),
    "audio": Refused(hint="Only text is produced."),
    "modalities": Refused(neutral=(["text"],), hint="Only text is produced."),
    "moderation": Refused(),
    "prediction": Refused(hint="Predicted outputs are not supported."),
    "reasoning_effort": Refused(neutral=("none",), hint="Use chat_template_kwargs."),
    "reasoning_format": Refused(neutral=("none", "auto")),
    "reasoning_control": Refused(neutral=(False,)),
    "verbosity": Refused(neutral=("medium",)),
    "web_search_options": Refused(),
    "include_reasoning": Ignored(why="there is no reasoning section to leave out"),
    "return_prompt_text": Refused(
        neutral=(False,), hint="POST /v1/chat/completions/render returns it."
    ),
    "documents": Refused(neutral=([],), hint="Put them in a message."),
    "mm_processor_kwargs": Refused(neutral=({},), hint=_ONLY_TEXT),
    "media_io_kwargs": Refused(neutral=({},), hint=_ONLY_TEXT),
    "audio_config": Refused(hint=_ONLY_TEXT),
}

# Of both endpoints that answer a prompt with choices.
_CHOICES: Mapping[str, Fate] = {
    **SAMPLING,
    "n": Implemented(meaning="Answers per prompt; answer 0 of a seeded request is that of n = 1."),
    "stream": Implemented(meaning="Send the answer as server-sent events, piece by piece."),
    "stream_options": Implemented(
        meaning="`include_usage` adds a chunk with the usage at the end, `continuous_usage_stats` "
        "puts it into each chunk."
    ),
    "prompt_logprobs": Implemented(
        meaning="Log-probabilities of the prompt's tokens and of so many alternatives; not with "
        "`stream`."
    ),
    "logprob_token_ids": Implemented(
        meaning="Also the log-probabilities of these tokens, at each position; needs `logprobs`."
    ),
    "return_token_ids": Implemented(meaning="Add the token ids of prompt and answer."),
    "return_tokens_as_token_ids": Implemented(
        meaning="Log-probabilities name tokens as `token_id:123`."
    ),
    "include_stop_str_in_output": Implemented(
        meaning="Keep the stop string or token that ended the text."
    ),
    "n_predict": Implemented(
        meaning="llama.cpp's name of `max_tokens`; -1 for what the context holds."
    ),
    "n_cmpl": Alias(of="n"),
    "repeat_penalty": Alias(
        of="repetition_penalty",
        needs=("repeat_last_n", -1),
        neutral=(1, 1.0),
        hint="With repeat_last_n: -1 it means repetition_penalty; other windows do not exist here.",
    ),
    "repeat_last_n": Ignored(why="only says how far back repeat_penalty looks"),
    "cache_prompt": Implemented(
        meaning="false: neither use nor leave behind what others could share of this prompt."
    ),
    "return_progress": Implemented(
        meaning="With `stream`: chunks with `prompt_progress` while the prompt is computed."
    ),
    "timings_per_token": Implemented(
        meaning="With `stream`: `timings` in each chunk, and not only in the last."
    ),
    "sse_ping_interval": Implemented(
        meaning="Seconds of silence after which a stream gets a comment; -1 for never."
    ),
    "user": Ignored(why=_BOOKKEEPING),
    "metadata": Ignored(why=_BOOKKEEPING),
    "safety_identifier": Ignored(why=_BOOKKEEPING),
    "prompt_cache_key": Ignored(why=_HINT_ONLY),
    "prompt_cache_retention": Ignored(why=_HINT_ONLY),
    "prompt_cache_options": Ignored(why=_HINT_ONLY),
    "session_id": Ignored(why=_HINT_ONLY),
    "store": Refused(neutral=(False,), hint="Nothing is stored here; leave it out."),
    "service_tier": Refused(neutral=("auto", "default"), hint="There is one tier; leave it out."),
    "response_format": Refused(neutral=({"type": "text"},), hint=STRUCTURED),
    "use_beam_search": Refused(neutral=(False,), hint="Beam search is not supported."),
    "length_penalty": Refused(neutral=(1, 1.0), hint="Beam search is not supported."),
    "early_stopping": Refused(neutral=(False,), hint="Beam search is not supported."),
    "spaces_between_special_tokens": Refused(neutral=(True,)),
    "structured_outputs": Refused(hint=STRUCTURED),
    "guided_json": Refused(hint=STRUCTURED),
    "guided_regex": Refused(hint=STRUCTURED),
    "guided_choice": Refused(hint=STRUCTURED),
    "guided_grammar": Refused(hint=STRUCTURED),
    "structural_tag": Refused(hint=STRUCTURED),
    "guided_decoding_backend": Ignored(why=_SWITCHED_OFF),
    "guided_whitespace_pattern": Ignored(why=_SWITCHED_OFF),
    "kv_transfer_params": Refused(),
    "vllm_xargs": Refused(neutral=({},)),
    "repetition_detection": Refused(),
    "thinking_token_budget": Refused(),
    "stream_interval": Refused(neutral=(1,)),
    "watermarking": Refused(neutral=(False,)),
    "post_sampling_probs": Refused(neutral=(False,), hint="Use logprobs."),
    "typical_p": Refused(neutral=(1, 1.0), hint="Use top_p or min_p."),
    "min_keep": Refused(neutral=(0, 1)),
    "top_n_sigma": Refused(neutral=(-1, -1.0, 0, 0.0), hint="Use top_p or min_p."),
    "adaptive_target": Refused(neutral=(-1, -1.0), hint="Use top_p or min_p."),
    "adaptive_decay": Ignored(why=_SWITCHED_OFF),
    "samplers": Refused(hint="The order is fixed: temperature, top_k, top_p, min_p."),
    "dry_multiplier": Refused(neutral=(0, 0.0), hint=_PENALTY),
    "dry_base": Ignored(why=_SWITCHED_OFF),
    "dry_allowed_length": Ignored(why=_SWITCHED_OFF),
    "dry_penalty_last_n": Ignored(why=_SWITCHED_OFF),
    "dry_sequence_breakers": Ignored(why=_SWITCHED_OFF),
    "xtc_probability": Refused(neutral=(0, 0.0)),
    "xtc_threshold": Ignored(why=_SWITCHED_OFF),
    "mirostat": Refused(neutral=(0,)),
    "mirostat_tau": Ignored(why=_SWITCHED_OFF),
    "mirostat_eta": Ignored(why=_SWITCHED_OFF),
    "dynatemp_range": Refused(neutral=(0, 0.0)),
    "dynatemp_exponent": Ignored(why=_SWITCHED_OFF),
    "grammar": Refused(neutral=("",), hint=STRUCTURED),
    "json_schema": Refused(hint=STRUCTURED),
    "t_max_predict_ms": Refused(neutral=(0,)),
    "n_keep": Refused(neutral=(0,)),
    "n_indent": Refused(neutral=(0,)),
    "n_cache_reuse": Ignored(why="shared prefixes are found by themselves, page by page"),
    "return_tokens": Refused(neutral=(False,), hint="Use return_token_ids."),
    "response_fields": Refused(neutral=([],)),
    "lora": Refused(neutral=([],), hint=_ONE_ADAPTER),
    "id_slot": Ignored(why="slots are not bound to requests here"),
}

FATES: Mapping[str, Mapping[str, Fate]] = MappingProxyType(
    {
        "completions": {**_COMPLETIONS, **_CHOICES},
        "chat": {**_CHAT, **_CHOICES},
        # Rendering takes a chat request as it is and only does the first half.
        "render": {**_CHAT, **_CHOICES},
        **MORE_ROWS,
    }
)
"""endpoint → field → what becomes of it."""
