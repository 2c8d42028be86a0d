"""What clients may send to the endpoints that answer with choices: completions and chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from jaxinfer.errors import InvalidRequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.body_fields import (
    MAX_LOGPROB_TOKEN_IDS,
    SamplingFields,
    check_num_logprobs,
    check_template_kwargs,
)
from jaxinfer.server.messages import MESSAGES_SCHEMA, to_template_messages
from jaxinfer.server.prompt_field import prompts_field

# What one request may set going: each choice is a sequence of its own.
MAX_CHOICES = 8192
DEFAULT_COMPLETION_TOKENS = 16

Messages = Annotated[
    list[dict[str, Any]], PlainValidator(to_template_messages), WithJsonSchema(MESSAGES_SCHEMA)
]


class StreamOptions(BaseModel):
    """What a stream carries besides text.

    Attributes:
        include_usage: Send one more chunk with the usage, before `[DONE]`.
        continuous_usage_stats: Send the usage so far in each chunk.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(SamplingFields):
    """The fields that both endpoints share."""

    n: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = Field(default=None, ge=-1)
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = Field(default=None, max_length=MAX_LOGPROB_TOKEN_IDS)
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    cache_prompt: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    sse_ping_interval: int | None = Field(default=None, ge=-1, le=86400)

    @model_validator(mode="after")
    def _check_shared(self) -> RequestFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs"
            )
        if self.n_predict is not None and self.max_tokens not in (None, self.n_predict):
            raise InvalidRequestError(
                "n_predict and max_tokens mean the same, but differ; send one of them", "n_predict"
            )
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def limit(self) -> int | None:
        """What the client says of the number of tokens; -1 for what the context holds."""
        return self.n_predict if self.max_tokens is None else self.max_tokens

    @property
    def limit_name(self) -> str:
        """The field in which the client says `limit`."""
        if self.max_tokens is None and self.n_predict is not None:
            return "n_predict"
        return "max_tokens"

    def _check_logprob_token_ids(self, num_logprobs: int | None) -> None:
        if self.logprob_token_ids and num_logprobs is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs", "logprob_token_ids")


class CompletionRequest(RequestFields):
    """The body of `POST /v1/completions`."""

    endpoint: ClassVar[str] = "completions"

    prompt: Annotated[list[str | list[int]], *prompts_field("prompt")]
    logprobs: int | None = None

    @property
    def only_echo(self) -> bool:
        """Whether nothing is generated: the prompt comes back, perhaps with log-probabilities."""
        return self.limit == 0 and bool(self.echo)

    @property
    def num_reserved_tokens(self) -> int:
        """Room for the answer that a prompt cut to the context leaves."""
        limit = DEFAULT_COMPLETION_TOKENS if self.limit is None else self.limit
        return max(1, limit)

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
        self._check_logprob_token_ids(self.logprobs)
        max_tokens = self.limit
        if max_tokens is None:
            max_tokens = max(1, min(DEFAULT_COMPLETION_TOKENS, room))
        elif self.only_echo:
            # The engine yields at least one token; the response drops it.
            max_tokens = 1
        elif self.n_predict == -1:
            max_tokens = None
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

    endpoint: ClassVar[str] = "chat"

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(default=None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        check_continuation(self.messages, self.continue_final_message, self.generation_prompt)
        check_template_kwargs(self.chat_template_kwargs)
        return self

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False

    @property
    def limit_name(self) -> str:
        """The field in which the client says how much it wants."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().limit_name

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_reserved_tokens(self) -> int:
        """Room for the answer that a prompt cut to the context leaves."""
        return max(1, self.max_completion_tokens or self.limit or 1)

    def sampling_params(
        self, generation_config: Mapping[str, Any], max_logprobs: int
    ) -> SamplingParams:
        """Return how to sample; without a limit of the caller's, up to the context's end.

        Raises:
            InvalidRequestError: A value is out of range.
        """
        check_num_logprobs("top_logprobs", self.top_logprobs, max_logprobs)
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs, max_logprobs)
        self._check_logprob_token_ids(self.num_logprobs)
        limits = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        max_tokens = next((limit for limit in limits if limit is not None), None)
        return self._sampling_params(
            generation_config,
            max_tokens=None if max_tokens == self.n_predict == -1 else max_tokens,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class RenderRequest(ChatCompletionRequest):
    """The body of `POST /v1/chat/completions/render`."""

    endpoint: ClassVar[str] = "render"


def check_continuation(
    messages: list[dict[str, Any]], continue_final_message: bool | None, generation_prompt: bool
) -> None:
    """Refuse to continue a message that is closed, or is not the assistant's.

    Raises:
        InvalidRequestError: `param` is "continue_final_message".
    """
    name = "continue_final_message"
    if continue_final_message and generation_prompt:
        raise InvalidRequestError(f"{name} needs add_generation_prompt: false", name)
    if continue_final_message and messages[-1]["role"] != "assistant":
        raise InvalidRequestError(f"{name} needs a last message with the role assistant", name)
