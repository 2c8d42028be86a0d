"""What clients may send: pydantic models of the request bodies, and their way to `SamplingParams`.

Types are strict: `"0.5"` is not a number, `true` is not 1 and `40.0` is not an integer, because a
client that sends those has a bug which guessing would hide. Ranges are checked once, by
`SamplingParams`. null always means the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from jaxinfer.errors import InvalidRequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.fields import CHAT, COMPLETIONS
from jaxinfer.server.messages import to_template_messages

MAX_PROMPTS = 1024
# What one request may set going: each choice is a sequence of its own.
MAX_CHOICES = 8192
MAX_REQUEST_ID_CHARS = 128
DEFAULT_COMPLETION_TOKENS = 16

# Also a response header, so nothing that could break out of one.
REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

# Fields that go to `SamplingParams` under the same name.
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
# What `generation_config.json` may set, as in vLLM; its `max_new_tokens` is left out because it is
# a limit of the makers' demo, not of the model.
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "self"}
)


def _stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if strings is not None and (
        not isinstance(strings, list) or not all(isinstance(s, str) for s in strings)
    ):
        raise InvalidRequestError("stop must be a string or a list of strings", "stop")
    return strings


def _logit_bias(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(
                f"logit_bias: the keys must be token ids, got {key[:40]!r}", "logit_bias"
            )
        if type(bias) not in (int, float):
            raise InvalidRequestError("logit_bias: the values must be numbers", "logit_bias")
    return {int(key): bias for key, bias in value.items()}


def _prompts(value: Any) -> list[str | list[int]]:
    """Return a batch of prompts, each text or token ids."""
    prompts = value
    if isinstance(value, str) or (isinstance(value, list) and value and _is_ids(value)):
        prompts = [value]
    if not isinstance(prompts, list) or not (
        all(isinstance(p, str) for p in prompts)
        or all(isinstance(p, list) and _is_ids(p) for p in prompts)
    ):
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
            "token ids",
            "prompt",
        )
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt must not be empty", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt: at most {MAX_PROMPTS} prompts a request, got {len(prompts)}", "prompt"
        )
    return prompts


def _is_ids(values: list[Any]) -> bool:
    return all(type(x) is int for x in values)


class StreamOptions(BaseModel):
    """What a stream carries besides text.

    Attributes:
        include_usage: Send one more chunk with the usage, before `[DONE]`.
        continuous_usage_stats: Send the usage so far in each chunk.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(BaseModel):
    """The fields that both endpoints share. Meaning and ranges: `SamplingParams`, `docs`."""

    model_config = ConfigDict(strict=True, extra="ignore")
    endpoint: ClassVar[str]

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, PlainValidator(_stop)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: Annotated[dict[int, float] | None, PlainValidator(_logit_bias)] = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_shared(self) -> RequestFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs"
            )
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            raise InvalidRequestError(
                f"request_id must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters "
                "without spaces",
                "request_id",
            )
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _sampling_params(
        self, generation_config: Mapping[str, Any], **resolved: Any
    ) -> SamplingParams:
        """Return the request's parameters: its own values, else the model's, else the API's."""
        values = {
            name: generation_config[name]
            for name in _MODEL_DEFAULTS
            if generation_config.get(name) is not None
        }
        values |= {k: v for k in _SAMPLING if (v := getattr(self, k)) is not None}
        params = SamplingParams(**(values | resolved))
        if params.greedy and params.n > 1:
            raise InvalidRequestError(
                "n must be 1 at temperature 0: all samples would be the same", "n"
            )
        return params


class CompletionRequest(RequestFields):
    """The body of `POST /v1/completions`."""

    endpoint: ClassVar[str] = COMPLETIONS

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: int | None = None

    @property
    def only_echo(self) -> bool:
        """Whether nothing is generated: the prompt comes back, perhaps with log-probabilities."""
        return self.max_tokens == 0 and bool(self.echo)

    def sampling_params(
        self, generation_config: Mapping[str, Any], max_logprobs: int, room: int
    ) -> SamplingParams:
        """Return how to sample.

        Args:
            generation_config: The model's defaults.
            max_logprobs: The server's limit.
            room: Tokens that fit behind the longest prompt; a cap for the default of
                `max_tokens` only.

        Raises:
            InvalidRequestError: A value is out of range.
        """
        num_choices = len(self.prompt) * (self.n or 1)
        if num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"n: at most {MAX_CHOICES} choices a request, got {num_choices} for "
                f"{len(self.prompt)} prompts; send fewer prompts at once or lower n",
                "n",
            )
        check_num_logprobs("logprobs", self.logprobs, max_logprobs)
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs, max_logprobs)
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = max(1, min(DEFAULT_COMPLETION_TOKENS, room))
        elif self.only_echo:
            # The engine yields at least one token; the response drops it.
            max_tokens = 1
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        return self._sampling_params(
            generation_config,
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class ChatCompletionRequest(RequestFields):
    """The body of `POST /v1/chat/completions`."""

    endpoint: ClassVar[str] = CHAT

    messages: Annotated[list[dict[str, Any]], PlainValidator(to_template_messages)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.continue_final_message and self.generation_prompt:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt: false",
                "continue_final_message",
            )
        if self.continue_final_message and self.messages[-1]["role"] != "assistant":
            raise InvalidRequestError(
                "continue_final_message needs a last message with the role assistant",
                "continue_final_message",
            )
        for name in _RESERVED_KWARGS & set(self.chat_template_kwargs or ()):
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {name}: it has a meaning of its own",
                "chat_template_kwargs",
            )
        return self

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(
        self, generation_config: Mapping[str, Any], max_logprobs: int
    ) -> SamplingParams:
        """Return how to sample; without a limit of the caller's, up to the context's end.

        Raises:
            InvalidRequestError: A value is out of range.
        """
        check_num_logprobs("top_logprobs", self.top_logprobs, max_logprobs)
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs, max_logprobs)
        limits = (self.max_completion_tokens, self.max_tokens)
        return self._sampling_params(
            generation_config,
            max_tokens=next((limit for limit in limits if limit is not None), None),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def check_num_logprobs(name: str, value: int | None, most: int) -> None:
    """Refuse more alternatives than the server gives; -1, the whole vocabulary, is more.

    Raises:
        InvalidRequestError: `param` is `name`.
    """
    if value is not None and not 0 <= value <= most:
        raise InvalidRequestError(f"{name} must be in [0, {most}], got {value}", name)
