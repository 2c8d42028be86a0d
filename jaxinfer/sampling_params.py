"""What a caller may ask of the sampler, validated once and immutable after.

Names, defaults and ranges are vLLM's, so that its users feel at home. The file knows no vocabulary:
`check_vocab` is called by the engine, which does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

from jaxinfer.errors import InvalidRequestError, quoted
from jaxinfer.logits_processor import LogitsProcessor, as_processors

MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
# Each is encoded before its request runs.
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 256
MAX_STOP_TOKEN_IDS = 1024
# More than any vocabulary.
MAX_ALLOWED_TOKEN_IDS = 2**19


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    Attributes:
        n: Samples per prompt. Sample 0 of a seeded request equals the `n=1` result.
        temperature: 0 is greedy. The logits are divided by it before top-k, top-p and min-p.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches it, in (0, 1].
        top_k: Keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        repetition_penalty: > 1 discourages every token seen in prompt or output
            (CTRL, arXiv:1909.05858).
        presence_penalty: Subtracted once from a token that the output already holds, in [-2, 2].
        frequency_penalty: Subtracted once per occurrence in the output, in [-2, 2].
        seed: The same seed gives the same tokens alone, in a batch, after preemption or restart.
            -1 is none, as in vLLM and llama.cpp.
        stop: Strings that end the text; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the output like an end-of-sequence token.
        ignore_eos: Go on after the model's own end-of-sequence tokens.
        bad_words: Strings that must not be produced; the front end adds their token ids to
            `bad_words_token_ids`.
        bad_words_token_ids: Token sequences that must not be produced.
        allowed_token_ids: If given, nothing else is produced.
        logit_bias: Token id → value added to its logit before anything else, in [-100, 100].
        max_tokens: Most tokens to produce; None means up to the context length.
        min_tokens: Stop tokens are impossible, and stop strings do not count, before that many
            tokens.
        logprobs: Log-probabilities of the sampled token and of this many likeliest; None for
            none. They are of the raw distribution: before bias, penalties and temperature.
        prompt_logprobs: The same for prompt tokens.
        prompt_logprobs_start: First position of the prompt that `prompt_logprobs` is about; what
            stands before it may come from the prefix cache.
        logprob_token_ids: Besides, the log-probabilities of these tokens at each position.
        logits_processors: Functions that change the logits, with their states: compiled into the
            sampler on first use, or at start if the engine was told of them.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the stop string that ended the text.
        detokenize: Produce text at all.

    Raises:
        InvalidRequestError: A value is out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor | Callable[..., Any]] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        _plain_numbers(self)
        _check_ranges(self)
        put = object.__setattr__
        put(self, "seed", None if self.seed == -1 else self.seed)
        put(self, "stop", _stop_strings(self.stop))
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        put(self, "logprob_token_ids", _ids("logprob_token_ids", self.logprob_token_ids))
        put(self, "logits_processors", as_processors(self.logits_processors))
        put(self, "bad_words", _bad_words(self.bad_words))
        put(self, "bad_words_token_ids", _id_sequences(self.bad_words_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            put(self, "allowed_token_ids", allowed)
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids must not be empty", "allowed_token_ids"
                )
        if self.logit_bias is not None:
            put(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequestError(
                "logprob_token_ids needs logprobs, which may be 0", "logprob_token_ids"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", "stop")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without drawing."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler must look at the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_host_tokens(self) -> bool:
        """Whether a token can be sampled only once the host has seen all those before it."""
        return any(len(words) > 1 for words in self.bad_words_token_ids or ())

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        """`logits_processors`, whatever form they were given in."""
        return cast("tuple[LogitsProcessor, ...]", self.logits_processors)

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must be shown the request's pages."""
        return self.has_penalties or any(p.takes_row for p in self.processors)

    @property
    def num_logprobs(self) -> int:
        """The larger of `logprobs` and `prompt_logprobs`, -1 if neither was asked for."""
        return max(-1 if x is None else x for x in (self.logprobs, self.prompt_logprobs))

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` if any token id lies outside [0, vocab_size)."""
        named = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logprob_token_ids": self.logprob_token_ids or (),
            "logit_bias": self.logit_bias or (),
            "bad_words_token_ids": [i for seq in self.bad_words_token_ids or () for i in seq],
        }
        for param, ids in named.items():
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidRequestError(
                        f"{param}: token id {quoted(token_id)} is outside the vocabulary of "
                        f"{vocab_size}",
                        param,
                    )


_NUMBERS = {
    # field: (lowest, highest, lowest itself allowed)
    "temperature": (0.0, math.inf, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, math.inf, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
_COUNTS = {
    "n": (1, 128),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 2**31 - 1),
    "prompt_logprobs": (0, 2**31 - 1),
    "prompt_logprobs_start": (0, 2**31 - 1),
}
_OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}


def _plain_numbers(p: Any) -> None:
    """Replace numpy's scalars, so that all who read them later know what they get."""
    for name in (*_NUMBERS, *_COUNTS):
        value = getattr(p, name)
        if isinstance(value, Real) and not isinstance(value, int | float):
            plain = int(value) if isinstance(value, Integral) else float(value)
            object.__setattr__(p, name, plain)


def _check_ranges(p: Any) -> None:
    for name, (low, high, closed) in _NUMBERS.items():
        value = getattr(p, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequestError(f"{name} must be a number, got {quoted(value)}", name)
        if not _is_finite(value) or value > high or (value < low if closed else value <= low):
            edge = "≥" if closed else ">"
            upper = "" if math.isinf(high) else f" and ≤ {high}"
            raise InvalidRequestError(
                f"{name} must be finite, {edge} {low}{upper}, got {quoted(value)}", name
            )
    for name, (low, high) in _COUNTS.items():
        value = getattr(p, name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(f"{name} must be an integer, got {quoted(value)}", name)
        if not low <= value <= high:
            raise InvalidRequestError(
                f"{name} must be in [{low}, {high}], got {quoted(value)}", name
            )
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens})", "min_tokens"
        )
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
        if not isinstance(getattr(p, name), bool):
            raise InvalidRequestError(f"{name} must be true or false", name)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _items("stop", stop, "a string or strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop: at most {MAX_STOP_STRINGS} strings, got {len(strings)}", "stop"
        )
    for s in strings:
        if not isinstance(s, str) or not s:
            raise InvalidRequestError(f"stop must hold non-empty strings, got {quoted(s)}", "stop")
        if len(s) > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"stop: a string may have {MAX_STOP_LENGTH} characters, got {len(s)}", "stop"
            )
    return strings


def _bad_words(words: Sequence[str] | None) -> tuple[str, ...]:
    items = _items("bad_words", words, "a list of strings", MAX_BAD_WORDS)
    for word in items:
        if not isinstance(word, str) or not word:
            raise InvalidRequestError(
                f"bad_words: expected a word, got {quoted(word)}", "bad_words"
            )
        if len(word) > MAX_BAD_WORD_LENGTH:
            raise InvalidRequestError(
                f"bad_words: a word may have {MAX_BAD_WORD_LENGTH} characters, got {len(word)}",
                "bad_words",
            )
    return items


def _ids(param: str, ids: Any, most: int | None = None) -> tuple[int, ...]:
    items = _items(param, ids, "a list of token ids", most)
    for i in items:
        if type(i) is int and i >= 0:
            continue
        if isinstance(i, bool) or not isinstance(i, Integral) or i < 0:
            raise InvalidRequestError(f"{param} must hold token ids ≥ 0, got {quoted(i)}", param)
    return tuple(map(int, items))


def _id_sequences(sequences: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    param = "bad_words_token_ids"
    items = _items(param, sequences, "a list of lists of token ids")
    result = tuple(_ids(param, s) for s in items)
    if any(not s for s in result):
        raise InvalidRequestError(f"{param} must hold non-empty sequences", param)
    return result


def _logit_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(
            f"logit_bias must map token ids to numbers, got {type(bias).__name__}", "logit_bias"
        )
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias: at most {MAX_LOGIT_BIAS} entries, got {len(bias)}", "logit_bias"
        )
    ids = _ids("logit_bias", tuple(bias))
    for value in bias.values():
        if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
            raise InvalidRequestError(
                f"logit_bias values must be finite numbers, got {quoted(value)}", "logit_bias"
            )
    return {i: max(-100.0, min(100.0, float(v))) for i, v in zip(ids, bias.values(), strict=True)}


def _items(param: str, values: Any, expected: str, most: int | None = None) -> tuple[Any, ...]:
    """Return the items of a list or array, at most so many; none if it is None."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequestError(f"{param} must be {expected}, got {quoted(values)}", param)
    items = tuple(values)
    if most is not None and len(items) > most:
        raise InvalidRequestError(f"{param} may hold {most} entries, got {len(items)}", param)
    return items


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False
