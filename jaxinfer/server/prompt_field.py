"""The forms in which clients send prompts: one text or many, token ids or lists of them."""

from __future__ import annotations

from typing import Any

from pydantic import PlainValidator, WithJsonSchema

from jaxinfer.errors import InvalidRequestError

MAX_PROMPTS = 1024

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_SCHEMA: Any = WithJsonSchema(
    {
        "anyOf": [
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1},
        ]
    }
)


def prompts_field(name: str, *, most: int = MAX_PROMPTS) -> tuple[Any, Any]:
    """Return the annotations of a field that holds a batch of prompts, each text or token ids."""

    def validate(value: Any) -> list[str | list[int]]:
        return _prompts(value, name, most)

    return PlainValidator(validate), _SCHEMA


def _prompts(value: Any, name: str, most: int) -> list[str | list[int]]:
    prompts = value
    if isinstance(value, str) or (isinstance(value, list) and value and _is_ids(value)):
        prompts = [value]
    if not isinstance(prompts, list) or not (
        all(isinstance(p, str) for p in prompts)
        or all(isinstance(p, list) and _is_ids(p) for p in prompts)
    ):
        raise InvalidRequestError(
            f"{name} must be a string, a list of strings, a list of token ids or a list of lists "
            "of token ids",
            name,
        )
    if not prompts or not all(prompts):
        raise InvalidRequestError(f"{name} must not be empty", name)
    if len(prompts) > most:
        raise InvalidRequestError(
            f"{name}: at most {most} prompts a request, got {len(prompts)}", name
        )
    return prompts


def _is_ids(values: list[Any]) -> bool:
    return all(type(x) is int for x in values)
