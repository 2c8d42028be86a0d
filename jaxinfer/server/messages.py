"""Chat messages as clients send them → the dicts that a chat template reads.

Text only. What a template could not show the model (images, tool calls) is refused, never dropped.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import InvalidRequestError

# `developer` is OpenAI's newer word for `system`, and templates know only the older one.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Rendering more takes seconds, for which other conversations wait.
MAX_MESSAGES = 10_000
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_UNSUPPORTED = ("tool_calls", "function_call", "tool_call_id", "audio")
# For the OpenAPI document; `to_template_messages` says more.
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {
                                "type": {"const": "text"},
                                "text": {"type": "string"},
                            },
                        },
                    },
                ]
            },
            "name": {"type": "string"},
        },
    },
}
# Joined as vLLM does for templates that expect a string.
PART_SEPARATOR = "\n"


def to_template_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages with plain string content.

    Raises:
        InvalidRequestError: Not a conversation of text; `param` says which message.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("messages must be a non-empty list of messages", "messages")
    check_num_messages(value)
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def check_num_messages(messages: list[Any]) -> None:
    """Refuse a conversation that takes too long to render, whether or not it may be cut.

    Raises:
        InvalidRequestError: `param` is "messages".
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages may hold {MAX_MESSAGES} messages, got {len(messages)}", "messages"
        )


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if role in ("tool", "function"):
        raise InvalidRequestError(f"{where}: tool calling is not supported yet", f"{where}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role"
        )
    for name in _UNSUPPORTED:
        if message.get(name):
            raise InvalidRequestError(f"{where}.{name} is not supported yet", f"{where}.{name}")
    result: dict[str, Any] = {"role": ROLES[role]}
    result["content"] = _content(message.get("content"), f"{where}.content")
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        result["reasoning_content"] = reasoning
    return result


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{where} must be a string or a list of text parts", where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise InvalidRequestError(
                f"{where}[{i}]: only parts of the type text are supported", f"{where}[{i}]"
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}[{i}].text must be a string", f"{where}[{i}]")
        texts.append(text)
    return PART_SEPARATOR.join(texts)
