"""What clients get: pydantic models of the response bodies and stream chunks.

Completions are sent with all their fields, chat without those that were not set, as vLLM does:
some clients test a chat chunk for the presence of `usage`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, model_serializer

type PromptLogprobs = list[dict[int, PromptLogprob] | None]


class PromptTokensDetails(BaseModel):
    """Where the prompt tokens came from.

    Attributes:
        cached_tokens: How many were found in the prefix cache.
        truncated: Whether the prompt was cut; sent only where the request allowed it.
    """

    cached_tokens: int
    truncated: bool | None = None

    @model_serializer(mode="wrap")
    def _leave_out(self, serialize: Any) -> dict[str, Any]:
        return {k: v for k, v in serialize(self).items() if v is not None}


class Timings(BaseModel):
    """Where the time of a request went; llama.cpp's names. Queueing is counted nowhere but there.

    Attributes:
        queue_ms: Arrival to the first step.
        cache_n: Prompt tokens that needed no computing.
        prompt_n: Prompt tokens computed.
        prompt_ms: First step to first token.
        predicted_n: Tokens produced.
        predicted_ms: First token to last token.
    """

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class PromptProgress(BaseModel):
    """How far a prompt is; llama.cpp's names.

    Attributes:
        total: Its tokens.
        cache: How many of them needed no computing.
        processed: How many are done, those included.
        time_ms: Since it first ran.
    """

    total: int
    cache: int
    processed: int
    time_ms: float


class Usage(BaseModel):
    """Tokens of one HTTP request: each prompt counted once, all samples counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(BaseModel):
    """One candidate at one prompt position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLogprobs(BaseModel):
    """Log-probabilities in the shape of `/v1/completions`: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One sample of one prompt, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """The answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None


class TopLogprob(BaseModel):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The sampled token and its likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities in the shape of `/v1/chat/completions`: one record per token."""

    content: list[TokenLogprob]


class ChatMessage(BaseModel):
    """The model's answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = None


class ChatChoice(BaseModel):
    """One sample."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    timings: Timings


class ChatDelta(BaseModel):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one sample."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str
    prompt_token_ids: list[int] | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None
