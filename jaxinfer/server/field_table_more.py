"""The table of request fields, continued: sampling fields that dialects share, and their own rows.

The boundary to `field_table` is only one of length.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxinfer.server.fields import Alias, Fate, Ignored, Implemented, Refused

TOOLS = "Tool calling is not supported yet."
STRUCTURED = "Structured output is not supported yet."
_BOOKKEEPING = "bookkeeping of the caller's; no answer depends on it"
_HINT_ONLY = "a hint to a hosted service's router or cache; this is one server"
_NO_TOOLS = "only tunes tool calling, and tools are refused"
_ONLY_TEXT = "Only text is read."
_NOT_STORED = "Nothing is stored here: send the whole conversation as input."

_MODEL: Mapping[str, Fate] = {
    "model": Implemented(meaning="The name under `/v1/models`; may be left out."),
    "request_id": Implemented(meaning="A name for the request, in the answer and in the log."),
}
_ADMISSION: Mapping[str, Fate] = {
    **_MODEL,
    "priority": Implemented(meaning="Lower runs first, under the priority policy."),
    "cache_salt": Implemented(
        meaning="Prefix pages are shared only among requests with the same salt."
    ),
    "truncate_prompt_tokens": Implemented(
        meaning="Cut a longer prompt to so many tokens, BOS included; -1 for what the context "
        "holds besides the answer."
    ),
    "truncation_side": Implemented(meaning='Which end is cut off, "left" (default) or "right".'),
}

SAMPLING: Mapping[str, Fate] = {
    **_ADMISSION,
    "temperature": Implemented(meaning="0 takes the likeliest token. Default: the model's, or 1."),
    "top_p": Implemented(
        meaning="Keep the smallest set of likeliest tokens whose probability reaches it."
    ),
    "top_k": Implemented(meaning="Keep the k likeliest tokens; 0 or -1 keeps all."),
    "min_p": Implemented(meaning="Keep tokens at least this fraction as likely as the likeliest."),
    "repetition_penalty": Implemented(
        meaning="> 1 discourages every token seen in prompt or output."
    ),
    "presence_penalty": Implemented(
        meaning="Subtracted once from a token that the output already holds, in [-2, 2]."
    ),
    "frequency_penalty": Implemented(
        meaning="Subtracted once per occurrence in the output, in [-2, 2]."
    ),
    "seed": Implemented(
        meaning="The same seed gives the same tokens alone, in a batch, after a restart; -1 is "
        "none."
    ),
    "stop": Implemented(meaning="A string or strings that end the text and are not part of it."),
    "stop_token_ids": Implemented(meaning="Tokens that end the output like an end-of-sequence."),
    "ignore_eos": Implemented(meaning="Go on after the model's own end-of-sequence tokens."),
    "bad_words": Implemented(meaning="Strings that must not be produced; at most 1,024."),
    "allowed_token_ids": Implemented(meaning="If given, nothing else is produced."),
    "logit_bias": Implemented(
        meaning="Token id → value added to its logit before anything else, in [-100, 100]; or "
        "llama.cpp's list of [token id, value]."
    ),
    "min_tokens": Implemented(meaning="Nothing ends the output before that many tokens."),
    "skip_special_tokens": Implemented(meaning="Leave special tokens out of the text."),
}

_RESPONSES: Mapping[str, Fate] = {
    **SAMPLING,
    "input": Implemented(meaning="A text, or a list of messages with text content."),
    "instructions": Implemented(meaning="A system message in front of the input."),
    "max_output_tokens": Implemented(
        meaning="Most tokens to produce. Default: what the context holds."
    ),
    "stream": Implemented(meaning="Send the answer as server-sent events, by name and number."),
    "include": Implemented(
        meaning="`message.output_text.logprobs` adds log-probabilities; the other names are "
        "refused."
    ),
    "top_logprobs": Implemented(meaning="Alternatives per token where they are included."),
    "truncation": Implemented(
        meaning='"auto" drops the start of a conversation that is too long; "disabled" refuses it.'
    ),
    "metadata": Implemented(meaning="Comes back in the answer."),
    "text": Implemented(meaning="Its `format` must be text."),
    "user": Implemented(meaning="Comes back in the answer."),
    "safety_identifier": Implemented(meaning="Comes back in the answer."),
    "prompt_cache_key": Implemented(meaning="Comes back in the answer."),
    "chat_template_kwargs": Implemented(meaning="Variables for the chat template."),
    "include_stop_str_in_output": Implemented(meaning="Keep the stop string that ended the text."),
    "previous_response_id": Refused(hint=_NOT_STORED),
    "conversation": Refused(hint=_NOT_STORED),
    "store": Refused(neutral=(False,), hint="Nothing is stored here; leave it out."),
    "background": Refused(neutral=(False,), hint="It needs a store; leave it out."),
    "background_options": Refused(hint="It needs a store; leave it out."),
    "prompt": Refused(hint="There are no stored prompts; send input and instructions."),
    "tools": Refused(neutral=([],), hint=TOOLS),
    "tool_choice": Refused(neutral=("none", "auto"), hint=TOOLS),
    "parallel_tool_calls": Ignored(why=_NO_TOOLS),
    "max_tool_calls": Ignored(why=_NO_TOOLS),
    "reasoning": Refused(
        neutral=({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
        hint="Use chat_template_kwargs.",
    ),
    "stream_options": Refused(neutral=({}, {"include_obfuscation": False})),
    "service_tier": Refused(neutral=("auto", "default"), hint="There is one tier; leave it out."),
    "context_management": Refused(neutral=([],)),
    "moderation": Refused(),
    "access_programs": Refused(),
    "image": Refused(hint=_ONLY_TEXT),
    "structured_outputs": Refused(hint=STRUCTURED),
    "prompt_cache_retention": Ignored(why=_HINT_ONLY),
    "prompt_cache_options": Ignored(why=_HINT_ONLY),
    "include_reasoning": Ignored(why="there is no reasoning section to leave out"),
    "mm_processor_kwargs": Refused(neutral=({},), hint=_ONLY_TEXT),
    "enable_response_messages": Refused(neutral=(False,)),
    "previous_input_messages": Refused(neutral=([],), hint=_NOT_STORED),
    "kv_transfer_params": Refused(),
}

_CLAUDE: Mapping[str, Fate] = {
    **_MODEL,
    "messages": Implemented(
        meaning="The conversation. If the last message is the assistant's, the answer goes on "
        "with it."
    ),
    "system": Implemented(meaning="A system message: a text or text blocks."),
    "chat_template_kwargs": Implemented(meaning="Variables for the chat template."),
    "tools": Refused(neutral=([],), hint=TOOLS),
    "tool_choice": Refused(neutral=({"type": "none"}, {"type": "auto"}), hint=TOOLS),
    "thinking": Refused(neutral=({"type": "disabled"},), hint="Use chat_template_kwargs."),
    "output_config": Refused(neutral=({},), hint=STRUCTURED),
    "output_format": Refused(hint=STRUCTURED),
    "context_management": Refused(neutral=({"edits": []},)),
    "mcp_servers": Refused(neutral=([],), hint=TOOLS),
    "speed": Refused(neutral=("standard",)),
    "cache_control": Ignored(why="every prompt's prefix is cached anyway"),
    "user_profile_id": Ignored(why=_BOOKKEEPING),
    "workspace_id": Ignored(why=_BOOKKEEPING),
}
_MESSAGES: Mapping[str, Fate] = {
    **_CLAUDE,
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed", "min_p")},
    **{name: SAMPLING[name] for name in ("priority", "cache_salt")},
    "max_tokens": Implemented(meaning="Most tokens to produce; required."),
    "stop_sequences": Implemented(meaning="Strings that end the text and are not part of it."),
    "stream": Implemented(meaning="Send the answer as Anthropic's server-sent events."),
    "metadata": Ignored(why=_BOOKKEEPING),
    "service_tier": Refused(neutral=("auto", "standard_only"), hint="There is one tier."),
    "container": Refused(hint=TOOLS),
    "inference_geo": Refused(hint="This is one server."),
    "diagnostics": Refused(neutral=({},)),
    "kv_transfer_params": Refused(),
}

_VECTORS: Mapping[str, Fate] = {
    **_ADMISSION,
    "pooling": Implemented(
        meaning='How tokens become one vector: "last" or "mean". Default: the server\'s.'
    ),
    "add_special_tokens": Implemented(
        meaning="Put the tokenizer's BOS in front of a text. Default: true."
    ),
    "user": Ignored(why=_BOOKKEEPING),
    "chat_template": Refused(hint="Texts are embedded as they are."),
    "chat_template_kwargs": Refused(neutral=({},), hint="Texts are embedded as they are."),
    "mm_processor_kwargs": Refused(neutral=({},), hint=_ONLY_TEXT),
    "media_io_kwargs": Refused(neutral=({},), hint=_ONLY_TEXT),
}
_EMBEDDINGS: Mapping[str, Fate] = {
    **_VECTORS,
    "input": Implemented(
        meaning="A text, a list of texts, a list of token ids, or a list of such lists."
    ),
    "encoding_format": Implemented(
        meaning='"float", or "base64": little-endian float32, which OpenAI\'s client asks for.'
    ),
    "use_activation": Implemented(meaning="Scale the vector to length 1. Default: true."),
    "normalize": Alias(of="use_activation"),
    "dimensions": Implemented(
        meaning="Must be the model's own size: a prefix of its vectors means nothing."
    ),
    "messages": Refused(hint="Send input."),
    "add_generation_prompt": Refused(neutral=(False,), hint="Send input."),
    "continue_final_message": Refused(neutral=(False,), hint="Send input."),
    "embed_dtype": Refused(neutral=("float32",), hint="Vectors are float32."),
    "endianness": Refused(neutral=("native", "little"), hint="base64 is little-endian."),
    "embd_normalize": Refused(neutral=(2,), hint="Use use_activation."),
}
_SCORE: Mapping[str, Fate] = {
    **_VECTORS,
    "text_1": Implemented(meaning="A text or texts to compare from; one is compared with each."),
    "text_2": Implemented(meaning="A text or texts to compare with."),
    "queries": Alias(of="text_1"),
    "documents": Alias(of="text_2"),
    "data_1": Alias(of="text_1"),
    "data_2": Alias(of="text_2"),
    "items": Refused(hint="Send text_1 and text_2."),
    "instruction": Refused(hint="Put it in the texts."),
    "softmax": Refused(hint="A score is the cosine of two vectors."),
    "activation": Refused(hint="A score is the cosine of two vectors."),
    "use_activation": Refused(hint="A score is the cosine of two vectors."),
}

_TEMPLATE: Mapping[str, Fate] = {
    "messages": Implemented(meaning="vLLM: a conversation to render and encode."),
    "add_generation_prompt": Implemented(
        meaning="End the conversation with the start of an answer. Default: true."
    ),
    "continue_final_message": Implemented(meaning="Leave the last message open."),
    "chat_template": Implemented(meaning="As for chat completions."),
    "chat_template_kwargs": Implemented(meaning="Variables for the chat template."),
    "tools": Refused(hint=TOOLS),
    "mm_processor_kwargs": Refused(neutral=({},), hint=_ONLY_TEXT),
    "media_io_kwargs": Refused(neutral=({},), hint=_ONLY_TEXT),
}
_TOKENIZE: Mapping[str, Fate] = {
    **_MODEL,
    **_TEMPLATE,
    "prompt": Implemented(meaning="vLLM: a text to encode."),
    "add_special_tokens": Implemented(
        meaning="vLLM: put BOS in front. Default: true for a prompt, false for messages."
    ),
    "return_token_strs": Implemented(meaning="vLLM: also the text of each token."),
    "content": Implemented(meaning="llama.cpp: a text to encode."),
    "add_special": Implemented(meaning="llama.cpp: put BOS in front. Default: false."),
    "with_pieces": Implemented(meaning="llama.cpp: the text, or bytes, of each token."),
    "parse_special": Refused(
        neutral=(True,), hint="A special token that a text spells out is always read as one."
    ),
}
_DETOKENIZE: Mapping[str, Fate] = {
    **_MODEL,
    "tokens": Implemented(meaning="The token ids. The text comes back under both dialects' names."),
}

ROWS: Mapping[str, Mapping[str, Fate]] = {
    "responses": _RESPONSES,
    "messages": _MESSAGES,
    "count_tokens": _CLAUDE,
    "embeddings": _EMBEDDINGS,
    "score": _SCORE,
    "tokenize": _TOKENIZE,
    "detokenize": _DETOKENIZE,
}
