"""The body of `POST /v1/responses` → messages and `SamplingParams`. Text only, nothing stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from jaxinfer.errors import InvalidRequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.body_fields import (
    SamplingFields,
    check_num_logprobs,
    check_template_kwargs,
    sampling_params,
)
from jaxinfer.server.messages import MESSAGES_SCHEMA, to_template_messages
from jaxinfer.truncation import Truncation

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA_CHARS = 100_000
_ITEM_FIELDS = ("type", "id", "status", "phase")


def _input(value: Any) -> list[dict[str, Any]]:
    """Return the input items as chat messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("input must be a string or a non-empty list of messages", "input")
    messages = []
    for i, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind != "message":
            where = f"input[{i}].type"
            raise InvalidRequestError(
                f"{where}: only messages are supported, got {str(kind)[:40]!r}", where
            )
        if isinstance(item, dict):
            item = {k: v for k, v in item.items() if k not in _ITEM_FIELDS}
        messages.append(item)
    try:
        return to_template_messages(messages)
    except InvalidRequestError as error:
        param = (error.param or "").replace("messages", "input", 1)
        raise InvalidRequestError(str(error).replace("messages", "input", 1), param) from None


def _include(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or any(name != LOGPROBS for name in value):
        raise InvalidRequestError(f"include may hold {LOGPROBS!r} only", "include")
    return value


def _metadata(value: Any) -> Any:
    if value is not None and (
        not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values())
    ):
        raise InvalidRequestError("metadata must map names to strings", "metadata")
    if value is not None and sum(len(k) + len(v) for k, v in value.items()) > MAX_METADATA_CHARS:
        raise InvalidRequestError(f"metadata may have {MAX_METADATA_CHARS} characters", "metadata")
    return value


class TextFormat(BaseModel):
    """The form of the answer; text is the only one."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str


class TextOptions(BaseModel):
    """`text` of a request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None

    @model_validator(mode="after")
    def _check(self) -> TextOptions:
        if self.format is not None and self.format.type != "text":
            raise InvalidRequestError(
                "text.format must be of the type text: structured output is not supported yet",
                "text.format",
            )
        return self


class ResponseRequest(SamplingFields):
    """The body of `POST /v1/responses`."""

    endpoint: ClassVar[str] = "responses"

    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(_input),
        WithJsonSchema({"anyOf": [{"type": "string"}, MESSAGES_SCHEMA]}),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    include: Annotated[
        list[str] | None,
        PlainValidator(_include),
        WithJsonSchema(
            {"anyOf": [{"type": "array", "items": {"enum": [LOGPROBS]}}, {"type": "null"}]}
        ),
    ] = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[
        dict[str, str] | None,
        PlainValidator(_metadata),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "object", "additionalProperties": {"type": "string"}},
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    text: TextOptions | None = None
    user: str | None = Field(default=None, max_length=MAX_METADATA_CHARS)
    safety_identifier: str | None = Field(default=None, max_length=MAX_METADATA_CHARS)
    prompt_cache_key: str | None = Field(default=None, max_length=MAX_METADATA_CHARS)
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_response(self) -> ResponseRequest:
        check_template_kwargs(self.chat_template_kwargs)
        if self.truncation == "disabled" and self.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                'truncation "disabled" forbids truncate_prompt_tokens; send one of them',
                "truncation",
            )
        return self

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that the chat template reads."""
        if self.instructions is None:
            return self.input
        return [{"role": "system", "content": self.instructions}, *self.input]

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.include else None

    def truncation_rule(self, max_model_len: int) -> Truncation | None:
        """Return how the prompt may be cut, None if it must not."""
        num_reserved = max(1, self.max_output_tokens or 1)
        if self.truncation == "auto" and self.truncate_prompt_tokens is None:
            return Truncation(keep=max(1, max_model_len - num_reserved))
        return self.cut_rule(max_model_len, num_reserved)

    def sampling_params(
        self, generation_config: Mapping[str, Any], max_logprobs: int
    ) -> SamplingParams:
        """Return how to sample; without a limit of the caller's, up to the context's end.

        Raises:
            InvalidRequestError: A value is out of range.
        """
        check_num_logprobs("top_logprobs", self.top_logprobs, max_logprobs)
        return sampling_params(
            self,
            generation_config,
            max_tokens=self.max_output_tokens,
            logprobs=self.num_logprobs,
        )
