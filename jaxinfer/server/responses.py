"""What clients get: pydantic models of the response bodies and stream chunks.

Completions are sent with all their fields, chat without those that were not set, as vLLM does:
some clients test a chat chunk for the presence of `usage`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

type PromptLogprobs = list[dict[int, PromptLogprob] | None]


class PromptTokensDetails(BaseModel):
    """Where the prompt tokens came from."""

    cached_tokens: int


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
