"""The bodies of `POST /v1/messages` and `count_tokens` → chat messages and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from jaxinfer.errors import InvalidRequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.body_fields import RequestBody, check_template_kwargs, sampling_params
from jaxinfer.server.messages import MAX_MESSAGES, check_num_messages

_ROLES = ("user", "assistant", "system")
_TEXT_BLOCK: dict[str, Any] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_TEXT: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK, "minItems": 1}]
}
_MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT},
    },
}


def _text(value: Any, where: str) -> str:
    """Return the text of a string or of text blocks; other blocks are refused by their type."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{where} must be a string or a list of text blocks", where)
    texts = []
    for i, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            raise InvalidRequestError(
                f"{where}[{i}]: only blocks of the type text are supported, got {str(kind)[:40]!r}",
                f"{where}[{i}]",
            )
        texts.append(block["text"])
    return "".join(texts)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("messages must be a non-empty list of messages", "messages")
    check_num_messages(value)
    messages = []
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(f"{where} must be an object with role and content", where)
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidRequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role"
            )
        text = _text(message.get("content"), f"{where}.content")
        if messages and messages[-1]["role"] == role:
            # As the API has it: turns of one role in a row are one turn.
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": role, "content": text})
    return messages


def _system(value: Any) -> str | None:
    return None if value is None else _text(value, "system")


class CountTokensRequest(RequestBody):
    """The body of `POST /v1/messages/count_tokens`."""

    endpoint: ClassVar[str] = "count_tokens"

    messages: Annotated[list[dict[str, Any]], PlainValidator(_messages), WithJsonSchema(_MESSAGES)]
    system: Annotated[
        str | None,
        PlainValidator(_system),
        WithJsonSchema({"anyOf": [*_TEXT["anyOf"], {"type": "null"}]}),
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_claude(self) -> CountTokensRequest:
        check_template_kwargs(self.chat_template_kwargs)
        return self

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages that the chat template reads."""
        if self.system is None:
            return self.messages
        return [{"role": "system", "content": self.system}, *self.messages]

    @property
    def template(self) -> dict[str, Any]:
        """How the conversation ends: with the start of an answer, or inside one."""
        continues = self.messages[-1]["role"] == "assistant"
        return {
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
            **(self.chat_template_kwargs or {}),
        }


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`."""

    endpoint: ClassVar[str] = "messages"

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)

    def sampling_params(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """Return how to sample.

        Raises:
            InvalidRequestError: A value is out of range.
        """
        return sampling_params(self, generation_config, stop=self.stop_sequences)
