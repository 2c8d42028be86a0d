"""The object of `/v1/responses` and the events of its stream. Shapes only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from jaxinfer.server.responses import Timings, TokenLogprob


class InputDetails(BaseModel):
    """Where the prompt tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """What kind the output's tokens are; none here are of reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens of one request, in the words of `/v1/responses`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(BaseModel):
    """The only kind of output item."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class IncompleteDetails(BaseModel):
    """Why an answer ended early."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseError(BaseModel):
    """Why an answer failed."""

    code: str
    message: str


class ResponseObject(BaseModel):
    """The answer of `/v1/responses`, at any time of its life; request fields come back in it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage | None = None
    timings: Timings | None = None
    instructions: str | None
    metadata: dict[str, str]
    max_output_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    text: dict[str, Any] = {"format": {"type": "text"}}
    reasoning: dict[str, Any] = {"effort": None, "summary": None}
    tools: list[Any] = []
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    background: bool = False
    store: bool = False
    service_tier: Literal["default"] = "default"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ResponseEvent(BaseModel):
    """What all events have; they are numbered from 0."""

    type: str
    sequence_number: int


class LifeEvent(ResponseEvent):
    """The answer was created, goes on, or ended."""

    response: ResponseObject


class ItemEvent(ResponseEvent):
    """An output item begins or is done."""

    output_index: int = 0
    item: OutputMessage


class PartEvent(ResponseEvent):
    """The text of an item begins or is done."""

    item_id: str
    output_index: int = 0
    content_index: int = 0
    part: OutputText


class TextDeltaEvent(ResponseEvent):
    """New text."""

    type: str = "response.output_text.delta"
    item_id: str
    output_index: int = 0
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDoneEvent(ResponseEvent):
    """The whole text."""

    type: str = "response.output_text.done"
    item_id: str
    output_index: int = 0
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ErrorEvent(ResponseEvent):
    """An error after the stream had begun."""

    type: str = "error"
    code: str | None
    message: str
    param: str | None
