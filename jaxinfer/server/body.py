"""From the bytes of a request to a JSON object, or a refusal. Knows no endpoint.

Stricter than `json.loads`, because each leniency there is a way to hurt someone later: NaN ends as
invalid JSON in a response, a duplicate key hides a value from whoever checks the first, a lone
surrogate cannot be tokenized.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from jaxinfer.errors import InvalidRequestError

# 2^64 has 20 digits; nothing in the API is larger.
MAX_INTEGER_DIGITS = 20
# Deeper than any real request (a JSON schema in a tool), far from the interpreter's own limit.
MAX_DEPTH = 64
# A parsed value takes up to 30 times its text: 32 MiB of `[],[],…` are a gigabyte, and Python's
# collector stops everybody for seconds to look at it. A million token ids are more than any prompt.
MAX_VALUES = 2**20
DRAIN_BYTES = 64 * 2**20
DRAIN_TIMEOUT_S = 5.0
# Ends at the end of the text if need be, for what is no string must not be looked at twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a body that says it is JSON.

    Raises:
        HTTPException: 413, the body is larger than `max_bytes`.
        InvalidRequestError: Not `application/json`.
        ClientDisconnect: The client left while sending.
    """
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequestError("Unsupported Media Type: send Content-Type: application/json")
    return await _read(request, max_bytes)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Return the object that `raw` spells.

    Raises:
        InvalidRequestError: Anything else than one strict JSON object; `param` is the field at
            fault, where there is one.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequestError("The body is not valid UTF-8") from None
    if _has_more_values(raw, MAX_VALUES):
        raise InvalidRequestError(
            f"The body holds more than {MAX_VALUES} values; send it in several requests"
        )
    reader = _Reader()
    try:
        body = reader.decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequestError(f"The body is not valid JSON: {error.msg} at {where}") from None
    except (RecursionError, ValueError):
        raise InvalidRequestError(
            f"The body is not valid JSON: nested deeper than {MAX_DEPTH}"
        ) from None
    if isinstance(body, _Refusal):
        raise InvalidRequestError(body.message)
    if not isinstance(body, dict):
        raise InvalidRequestError("The body must be a JSON object")
    check_text = _SURROGATE_ESCAPE.search(raw) is not None
    for name, value in body.items():
        _check_tree(name, value, check_text=check_text, find_refusals=reader.refused)
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = int(declared) if declared.isascii() and declared.isdigit() else 0
    if size <= max_bytes:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                break
            chunks.append(chunk)
    if size > max_bytes:
        await _drain(request)
        raise HTTPException(
            413, f"The body may have {max_bytes} bytes", headers={"Connection": "close"}
        )
    return b"".join(chunks)


async def _drain(request: Request) -> None:
    """Read on for a while: answering at once resets the connection before the client reads 413."""
    size = 0
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while size < DRAIN_BYTES:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _has_more_values(raw: bytes, most: int) -> bool:
    """Whether a JSON text holds more than so many values, told by its commas and brackets."""
    if _num_marks(raw, 0, len(raw)) <= most:
        return False
    count, end = 0, 0
    for string in _STRING.finditer(raw):
        count += _num_marks(raw, end, string.start())
        if count > most:
            return True
        end = string.end()
    return count + _num_marks(raw, end, len(raw)) > most


def _num_marks(raw: bytes, start: int, end: int) -> int:
    return sum(raw.count(mark, start, end) for mark in (b",", b"[", b"{"))


@dataclass(frozen=True)
class _Refusal:
    """Stands in the tree where the text had something to refuse, until its field is known."""

    message: str


class _Reader:
    """A JSON decoder for one body. Its hooks do not know where they are, so they only take notes.

    Attributes:
        refused: Whether the tree holds a `_Refusal`.
    """

    def __init__(self) -> None:
        self.refused = False
        self.decode = json.JSONDecoder(
            object_pairs_hook=self._object,
            parse_constant=self._constant,
            parse_int=self._integer,
            parse_float=self._number,
        ).decode

    def _refuse(self, message: str) -> _Refusal:
        self.refused = True
        return _Refusal(message)

    def _constant(self, name: str) -> _Refusal:
        return self._refuse(f"The body is not valid JSON: {name} is not a JSON number")

    def _integer(self, text: str) -> int | _Refusal:
        if len(text) > MAX_INTEGER_DIGITS and len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
            return self._refuse(f"The number {text[:20]}… is too large")
        return int(text)

    def _number(self, text: str) -> float | _Refusal:
        value = float(text)
        if not math.isfinite(value):
            return self._refuse(f"The number {text[:20]} is too large")
        return value

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    result[key] = self._refuse(f"The key {key[:80]!r} occurs twice")
                seen.add(key)
        return result


def _check_tree(name: str, value: Any, *, check_text: bool, find_refusals: bool) -> None:
    """Refuse a field with what the reader refused, half a surrogate pair, or too deep a nesting.

    Iterative: depth is hostile.
    """
    # Long lists are token ids: leaves need a look only if one of them is known to be bad.
    check_leaves = check_text or find_refusals
    param = name[:80]
    if check_text:
        _check_text(name, None)
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                inner.extend(node.values())
                if check_text:
                    inner.extend(node)
            elif isinstance(node, list):
                inner.extend(node if check_leaves else [x for x in node if type(x) in (dict, list)])
            elif isinstance(node, _Refusal):
                raise InvalidRequestError(node.message, param)
            elif check_text and isinstance(node, str):
                _check_text(node, param)
        if not inner:
            return
        level = inner
    raise InvalidRequestError(f"{param} is nested deeper than {MAX_DEPTH}", param)


def _check_text(text: str, param: str | None) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "The body holds half of a surrogate pair, which is not text", param
        ) from None
