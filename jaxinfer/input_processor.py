"""What a caller asks → what the engine runs: prompt forms, encoding, limits, bad words, seeds.

Front end only: token ids go out, nothing of a running request is known here. Every refusal is an
`InvalidRequestError` that names the field, raised before the engine hears of the request. Safe to
call from several threads.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from jaxinfer.errors import InvalidRequestError, quoted
from jaxinfer.hooks import Hooks
from jaxinfer.request import Pooling
from jaxinfer.sampling_batch import child_seed
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.truncation import Truncation

# A prompt: text, token ids, or a mapping with one or both (ids are run, text is only reported).
type Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# Ordinary text has 3 to 5 characters a token: what is longer than this may not fit.
_PROBE_CHARS_PER_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A request that the engine can run, fanned out to one sequence per sample.

    Attributes:
        request_id: The caller's name for it.
        prompt: Its text, None if it came as token ids.
        prompt_token_ids: What runs.
        params: As asked, with `max_tokens` resolved.
        sample_params: What the engine gets for each sample; `n` is 1.
        seeds: One per sample.
        priority: Lower runs first under the "priority" policy.
        cache_salt: Prefix pages are shared only among equal salts.
        arrival_time: `time.monotonic()` seconds.
        pooling: If given, a vector of the prompt is asked for instead of tokens.
        hooks: What it looks at and changes inside the model.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    sample_params: tuple[SamplingParams, ...]
    seeds: tuple[int, ...]
    priority: int
    cache_salt: str
    arrival_time: float
    pooling: Pooling | None = None
    hooks: Hooks | None = None

    def sample_id(self, index: int) -> str:
        """Return the engine's name for one sample; distinct for distinct requests."""
        return f"{self.request_id}-{index}"

    def engine_request(self, index: int) -> dict[str, Any]:
        """Return the arguments of `Engine.add_request` for one sample."""
        return {
            "request_id": self.sample_id(index),
            "prompt_token_ids": self.prompt_token_ids,
            "params": self.sample_params[index],
            "seed": self.seeds[index],
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "arrival_time": self.arrival_time,
            # Named only where it matters: most engines need not know of it.
            **({} if self.pooling is None else {"pooling": self.pooling}),
            **({} if self.hooks is None else {"hooks": self.hooks}),
        }


class InputProcessor:
    """Checks, encodes and fans out requests for one engine.

    Args:
        tokenizer: Of the model.
        max_model_len: Longest prompt + output, tokens.
        vocab_size: Of the model; token ids lie below it.
        max_logprobs: Most alternatives per token that may be asked for.
        seed: Makes the seeds of unseeded requests repeatable in the order of their arrival.
            None: unpredictable.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        max_logprobs: int,
        seed: int | None = None,
    ):
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self._seeds = None if seed is None else random.Random(seed)
        self._seeds_lock = threading.Lock()

    def base_seed(self, params: SamplingParams) -> int:
        """Return the request's seed, from which those of its samples follow."""
        if params.seed is not None:
            return params.seed
        if self._seeds is None:
            return secrets.randbits(64)
        with self._seeds_lock:
            return self._seeds.getrandbits(64)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        base_seed: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float | None = None,
        pooling: Pooling | None = None,
    ) -> PreparedRequest:
        """Return the request ready for the engine.

        Args:
            request_id: A non-empty name.
            prompt: See `Prompt`.
            params: How to sample.
            base_seed: From `base_seed()`, if it was drawn earlier.
            priority: Lower runs first under the "priority" policy.
            cache_salt: Prefix pages are shared only among equal salts.
            arrival_time: `time.monotonic()` seconds; None for now.
            pooling: If given, a vector of the prompt is asked for instead of tokens.

        Raises:
            InvalidRequestError: It can never be served as asked; `param` names the field.
        """
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                "sampling_params",
            )
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id must be a non-empty string, got {quoted(request_id)}", "request_id"
            )
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise InvalidRequestError(
                f"priority must be an integer, got {quoted(priority)}", "priority"
            )
        self._check_logprobs(params)
        params = self._with_bad_word_ids(params)
        params.check_vocab(self._vocab_size)
        self._check_choice(params)
        text, token_ids, own_salt = _split_prompt(prompt)
        cache_salt = _check_salt(own_salt if own_salt is not None else cache_salt)
        if token_ids is None:
            token_ids = self._encode(text or "")
        else:
            token_ids = self._check_token_ids(token_ids)
        params = self._with_max_tokens(params, len(token_ids))
        seed = self.base_seed(params) if base_seed is None else base_seed
        return PreparedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=tuple(token_ids),
            params=params,
            sample_params=per_sample(params),
            seeds=tuple(child_seed(seed, i) for i in range(params.n)),
            priority=int(priority),
            cache_salt=cache_salt,
            arrival_time=arrival_time,
            pooling=pooling,
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        truncation: Truncation | None = None,
        max_chars: int = 0,
        **template: Any,
    ) -> Prompt:
        """Return the conversation as a prompt, rendered by the model's chat template.

        Args:
            messages: One conversation.
            truncation: How a prompt that is too long may be cut.
            max_chars: See `encode`.
            template: `add_generation_prompt`, `continue_final_message`, `tools` and whatever the
                template itself understands.

        Raises:
            InvalidRequestError: There is no template, or it cannot render these messages.
        """
        text = self.tokenizer.render_chat(messages, **template)
        _check_text(text, "messages")
        # The template writes the special tokens itself; adding them again would give two BOS.
        ids = self.encode(
            text, add_special_tokens=False, truncation=truncation, max_chars=max_chars
        )
        return {"prompt": text, "prompt_token_ids": ids}

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
        max_chars: int = 0,
    ) -> list[int]:
        """Return the token ids of a text that is to be a prompt.

        That a very long text does not fit is told from its start: encoding all of it would take
        minutes of a processor and gigabytes, only to count what is refused anyway.

        Args:
            text: The text.
            add_special_tokens: Put the tokenizer's BOS in front.
            truncation: How a text that is too long may be cut.
            max_chars: A text of no more characters is encoded even if it does not fit.

        Raises:
            InvalidRequestError: It is no Unicode text, or far longer than the context.
        """
        _check_text(text, "prompt")
        if truncation is not None:
            text = truncation.cut_text(text)
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return truncation.cut(ids, self.tokenizer.bos_token_id)
        if len(text) <= max_chars:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        num_chars = _PROBE_CHARS_PER_TOKEN * self._max_model_len
        while num_chars < len(text):
            start = self.tokenizer.encode(text[:num_chars], add_special_tokens=False)
            # Twice, because the cut may have changed how the last words are split.
            if len(start) > 2 * self._max_model_len:
                raise self._too_long("far more than")
            num_chars *= 4
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, text: str) -> list[int]:
        token_ids = self.encode(text)
        if not token_ids:
            raise InvalidRequestError("prompt must not be empty", "prompt")
        return token_ids

    def _check_token_ids(self, ids: Sequence[Any]) -> list[int]:
        if len(ids) >= self._max_model_len:  # before a look at each of perhaps millions
            raise self._too_long(len(ids))
        return _check_token_ids(ids, self._vocab_size)

    def _too_long(self, num_tokens: int | str) -> InvalidRequestError:
        if isinstance(num_tokens, str):
            num_tokens = f"{num_tokens} {self._max_model_len}"
        return InvalidRequestError(
            f"The prompt has {num_tokens} tokens, but the context holds {self._max_model_len} "
            "tokens, prompt and output together. Shorten the prompt.",
            "prompt",
        )

    def _check_choice(self, params: SamplingParams) -> None:
        """Refuse parameters that together leave no token to choose from."""
        banned = {words[0] for words in params.bad_words_token_ids or () if len(words) == 1}
        if params.min_tokens:
            banned.update(params.stop_token_ids or ())
            banned.update(() if params.ignore_eos else self.tokenizer.eos_token_ids)
        allowed = params.allowed_token_ids
        if allowed is None:
            if len(banned) >= self._vocab_size:
                raise InvalidRequestError("bad_words rule out every token", "bad_words")
        elif banned.issuperset(allowed):
            raise InvalidRequestError(
                "allowed_token_ids leave no token to choose from: all of them are ruled out by "
                "bad_words, or are stop tokens and thus impossible before min_tokens",
                "allowed_token_ids",
            )

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self._max_logprobs:
                raise InvalidRequestError(
                    f"{name} may be at most {self._max_logprobs}, got {asked}; the engine's "
                    f"`max_logprobs` sets the limit",
                    name,
                )

    def _with_bad_word_ids(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words:
            return params
        sequences = list(params.bad_words_token_ids or ())
        for word in params.bad_words:
            _check_text(word, "bad_words")
            sequences += self.tokenizer.encode_bad_word(word)
        # Two words may share a spelling; the sampler's table has room for each only once.
        unique = dict.fromkeys(tuple(sequence) for sequence in sequences if sequence)
        return replace(params, bad_words=None, bad_words_token_ids=tuple(unique))

    def _with_max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise self._too_long(num_prompt_tokens)
        if params.max_tokens is None:
            return replace(params, max_tokens=room)
        if params.max_tokens > room:
            raise InvalidRequestError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, "
                f"you requested {num_prompt_tokens + params.max_tokens} tokens "
                f"({num_prompt_tokens} in the prompt, {params.max_tokens} in the output). "
                f"Shorten the prompt or lower max_tokens to {room}.",
                "max_tokens",
            )
        return params


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return what the model's makers recommend, from `generation_config.json`.

    Raises:
        InvalidRequestError: The file holds a value out of range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation_config.get(name) for name in names}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _split_prompt(prompt: Prompt) -> tuple[str | None, Sequence[Any] | None, str | None]:
    """Return text, token ids and cache salt of a prompt, each None if it has none."""
    if isinstance(prompt, str):
        return prompt, None, None
    if hasattr(prompt, "tolist"):  # a numpy or jax array
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in _PROMPT_KEYS]
        if unknown:
            raise InvalidRequestError(
                f"prompt: expected the keys {', '.join(_PROMPT_KEYS)}, got {quoted(unknown[0])}",
                "prompt",
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        if (text is not None or ids is None) and not isinstance(text, str):
            raise InvalidRequestError(
                f"prompt must hold text or token ids, got {type(text).__name__} under 'prompt'",
                "prompt",
            )
        if ids is not None and not _is_sequence(ids):
            raise InvalidRequestError(
                f"prompt_token_ids must be a list of token ids, got {type(ids).__name__}", "prompt"
            )
        return text, ids, prompt.get("cache_salt")
    if _is_sequence(prompt):
        return None, prompt, None
    raise InvalidRequestError(
        "prompt must be a string, a list of token ids or a mapping with 'prompt' or "
        f"'prompt_token_ids', got {type(prompt).__name__}",
        "prompt",
    )


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _check_text(text: str, param: str) -> None:
    """Refuse half a surrogate pair, which JSON can carry and no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} is not valid Unicode text: {error.reason} at character {error.start}", param
        ) from None


def _check_salt(cache_salt: Any) -> str:
    if not isinstance(cache_salt, str):
        raise InvalidRequestError(
            f"cache_salt must be a string, got {type(cache_salt).__name__}", "cache_salt"
        )
    _check_text(cache_salt, "cache_salt")
    return cache_salt


def _check_token_ids(ids: Iterable[Any], vocab_size: int) -> list[int]:
    checked = []
    for i in ids:
        # True would run as token 1: nobody means that.
        if isinstance(i, bool) or not isinstance(i, Integral):
            raise InvalidRequestError(
                f"prompt: token ids must be integers, got {quoted(i)} at position {len(checked)}",
                "prompt",
            )
        token_id = int(i)
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"prompt: token id {quoted(token_id)} at position {len(checked)} is outside the "
                f"vocabulary of {vocab_size}",
                "prompt",
            )
        checked.append(token_id)
    if not checked:
        raise InvalidRequestError("prompt must not be empty", "prompt")
    return checked


def per_sample(params: SamplingParams) -> tuple[SamplingParams, ...]:
    """Return what the engine gets for each of a request's samples."""
    first = params if params.n == 1 else replace(params, n=1)
    # The samples share their prompt, so its log-probabilities are computed once.
    rest = first if first.prompt_logprobs is None else replace(first, prompt_logprobs=None)
    return (first,) + (rest,) * (params.n - 1)
