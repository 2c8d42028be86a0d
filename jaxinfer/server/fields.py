"""The one table of request fields that are not implemented: refused by name, or ignored on purpose.

What is implemented is a field of a model in `protocol`. A field in neither place is unknown: it is
accepted, because clients send extras, and logged once. A refused field is accepted at its neutral
values, at which it asks for nothing: clients send whole objects with nulls and defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.errors import InvalidRequestError

logger = logging.getLogger("jaxinfer.server")

COMPLETIONS = "completions"
CHAT = "chat"
BOTH = (COMPLETIONS, CHAT)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A field that asks for something this server cannot do.

    Attributes:
        neutral: Values besides null at which it asks for nothing.
        hint: What to do instead; ends the error message.
        endpoints: Where it is known.
    """

    neutral: tuple[Any, ...] = ()
    hint: str = ""
    endpoints: tuple[str, ...] = BOTH


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """A field that changes nothing here, whatever its value.

    Attributes:
        why: Why ignoring it gives nobody a wrong answer.
        endpoints: Where it is known.
    """

    why: str
    endpoints: tuple[str, ...] = BOTH


_BOOKKEEPING = "bookkeeping of the caller's; no answer depends on it"
_HINT_ONLY = "a hint to a hosted service's router or cache; this is one server"
_SWITCHED_OFF = "only tunes a feature whose own switch is refused"
_TOOLS = "Tool calling is not supported yet."
_STRUCTURED = "Structured output is not supported yet."
_ONE_ADAPTER = "Only the base model is served."
_PENALTY = "Use repetition_penalty, presence_penalty or frequency_penalty."

FIELDS: Mapping[str, Refused | Ignored] = {
    # OpenAI
    "user": Ignored(why=_BOOKKEEPING),
    "metadata": Ignored(why=_BOOKKEEPING),
    "safety_identifier": Ignored(why=_BOOKKEEPING),
    "prompt_cache_key": Ignored(why=_HINT_ONLY),
    "prompt_cache_retention": Ignored(why=_HINT_ONLY),
    "parallel_tool_calls": Ignored(why=_SWITCHED_OFF, endpoints=(CHAT,)),
    "store": Refused(neutral=(False,), hint="Nothing is stored here; leave it out."),
    "service_tier": Refused(neutral=("auto", "default"), hint="There is one tier; leave it out."),
    "best_of": Refused(hint="Only best_of equal to n is supported.", endpoints=(COMPLETIONS,)),
    "suffix": Refused(neutral=("",), hint="Filling in the middle is not supported."),
    "tools": Refused(hint=_TOOLS),
    "tool_choice": Refused(neutral=("none",), hint=_TOOLS),
    "functions": Refused(hint=_TOOLS),
    "function_call": Refused(neutral=("none",), hint=_TOOLS),
    "response_format": Refused(neutral=({"type": "text"},), hint=_STRUCTURED),
    "audio": Refused(hint="Only text is produced."),
    "modalities": Refused(neutral=(["text"],), hint="Only text is produced."),
    "moderation": Refused(),
    "prediction": Refused(hint="Predicted outputs are not supported."),
    "reasoning_effort": Refused(neutral=("none",), hint="Use chat_template_kwargs."),
    "verbosity": Refused(neutral=("medium",)),
    "web_search_options": Refused(),
    "top_logprobs": Refused(
        neutral=(0,), hint="Here logprobs itself is the number.", endpoints=(COMPLETIONS,)
    ),
    "max_completion_tokens": Refused(hint="Use max_tokens.", endpoints=(COMPLETIONS,)),
    # vLLM
    "session_id": Ignored(why=_HINT_ONLY),
    "include_reasoning": Ignored(why="there is no reasoning section to leave out"),
    "truncation_side": Ignored(why=_SWITCHED_OFF),
    "use_beam_search": Refused(neutral=(False,), hint="Beam search is not supported."),
    "length_penalty": Refused(neutral=(1, 1.0), hint="Beam search is not supported."),
    "early_stopping": Refused(neutral=(False,), hint="Beam search is not supported."),
    "truncate_prompt_tokens": Refused(hint="Send a prompt that fits."),
    "spaces_between_special_tokens": Refused(neutral=(True,)),
    "logprob_token_ids": Refused(neutral=([],)),
    "prompt_embeds": Refused(hint="Send text or token ids."),
    "structured_outputs": Refused(hint=_STRUCTURED),
    "guided_json": Refused(hint=_STRUCTURED),
    "guided_regex": Refused(hint=_STRUCTURED),
    "guided_choice": Refused(hint=_STRUCTURED),
    "guided_grammar": Refused(hint=_STRUCTURED),
    "guided_decoding_backend": Ignored(why=_SWITCHED_OFF),
    "guided_whitespace_pattern": Ignored(why=_SWITCHED_OFF),
    "kv_transfer_params": Refused(),
    "vllm_xargs": Refused(neutral=({},)),
    "repetition_detection": Refused(),
    "thinking_token_budget": Refused(),
    "stream_interval": Refused(neutral=(1,)),
    "return_prompt_text": Refused(neutral=(False,), endpoints=(CHAT,)),
    "documents": Refused(neutral=([],), hint="Put them in a message.", endpoints=(CHAT,)),
    "chat_template": Refused(
        hint="The server's template is used; chat_template_kwargs reach it.", endpoints=(CHAT,)
    ),
    "mm_processor_kwargs": Refused(neutral=({},), hint="Only text is read."),
    "media_io_kwargs": Refused(neutral=({},), hint="Only text is read."),
    # llama.cpp
    "n_predict": Refused(hint="Use max_tokens."),
    "n_cmpl": Refused(neutral=(1,), hint="Use n."),
    "n_probs": Refused(neutral=(0,), hint="Use logprobs."),
    "post_sampling_probs": Refused(neutral=(False,), hint="Use logprobs."),
    "repeat_penalty": Refused(neutral=(1, 1.0), hint="Use repetition_penalty."),
    "repeat_last_n": Ignored(why=_SWITCHED_OFF),
    "typical_p": Refused(neutral=(1, 1.0), hint="Use top_p or min_p."),
    "min_keep": Refused(neutral=(0, 1)),
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
    "grammar": Refused(neutral=("",), hint=_STRUCTURED),
    "json_schema": Refused(hint=_STRUCTURED),
    "t_max_predict_ms": Refused(neutral=(0,)),
    "n_keep": Refused(neutral=(0,)),
    "return_tokens": Refused(neutral=(False,), hint="Use return_token_ids."),
    "timings_per_token": Refused(neutral=(False,)),
    "return_progress": Refused(neutral=(False,)),
    "response_fields": Refused(neutral=([],)),
    "lora": Refused(neutral=([],), hint=_ONE_ADAPTER),
    "id_slot": Ignored(why="slots are not bound to requests here"),
    "cache_prompt": Refused(neutral=(True,), hint="Use cache_salt to keep a prompt to yourself."),
    "sse_ping_interval": Ignored(why="only how often an idle stream is pinged"),
    "reasoning_format": Refused(neutral=("none", "auto")),
}


def refuse_unsupported(body: Mapping[str, Any], endpoint: str) -> None:
    """Refuse a body that asks for what is not implemented.

    Raises:
        InvalidRequestError: `param` names the field.
    """
    for name, value in body.items():
        rule = FIELDS.get(name)
        if not isinstance(rule, Refused) or endpoint not in rule.endpoints or value is None:
            continue
        if name == "best_of" and _same(value, body.get("n") or 1):
            continue
        if any(_same(value, neutral) for neutral in rule.neutral):
            continue
        raise InvalidRequestError(f"{name} is not supported. {rule.hint}".rstrip(), name)


class UnknownFieldLog:
    """Warns of each unknown field once. Bounded: names come from clients.

    Args:
        warn: Called with a printf-style message.
    """

    MAX_NAMES = 200
    MAX_NAME_CHARS = 64

    def __init__(self, warn: Callable[..., None] = logger.warning):
        self._warn = warn
        self._seen: set[str] = set()

    def note(self, body: Mapping[str, Any], implemented: Collection[str]) -> None:
        """Warn of the fields that are neither implemented nor in `FIELDS`."""
        for name in body:
            if name in implemented or name in FIELDS or len(self._seen) >= self.MAX_NAMES:
                continue
            short = name[: self.MAX_NAME_CHARS]
            if short not in self._seen:
                self._seen.add(short)
                self._warn("ignoring the unknown request field %r", short)


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, but `"mirostat": true` is not `"mirostat": 0`'s neighbour.
    return type(value) is type(neutral) and value == neutral
