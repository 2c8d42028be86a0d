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
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from jaxinfer.errors import InvalidRequestError

# 2^64 has 20 digits; nothing in the API is larger.
MAX_INTEGER_DIGITS = 20
# Deeper than any real request (a JSON schema in a tool), far from the interpreter's own limit.
MAX_DEPTH = 64
DRAIN_BYTES = 64 * 2**20
DRAIN_TIMEOUT_S = 5.0
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the request's body as an object.

    Raises:
        HTTPException: 413, the body is larger than `max_bytes`.
        InvalidRequestError: Not `application/json`, not JSON, or not an object.
        ClientDisconnect: The client left while sending.
    """
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequestError("Unsupported Media Type: send Content-Type: application/json")
    return parse_json_object(await _read(request, max_bytes))


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Return the object that `raw` spells.

    Raises:
        InvalidRequestError: Anything else than one strict JSON object.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequestError("The body is not valid UTF-8") from None
    try:
        body = _DECODER.decode(text)
    except InvalidRequestError:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequestError(f"The body is not valid JSON: {error.msg} at {where}") from None
    except (RecursionError, ValueError):
        raise InvalidRequestError(
            f"The body is not valid JSON: nested deeper than {MAX_DEPTH}"
        ) from None
    if not isinstance(body, dict):
        raise InvalidRequestError("The body must be a JSON object")
    _check_tree(body, check_text=_SURROGATE_ESCAPE.search(raw) is not None)
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


def _no_constant(name: str) -> Any:
    raise InvalidRequestError(f"The body is not valid JSON: {name} is not a JSON number")


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise InvalidRequestError(f"The number {text[:20]}… is too large")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequestError(f"The number {text[:20]} is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequestError(f"The key {key[:80]!r} occurs twice", key[:80])
            seen.add(key)
    return result


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_constant=_no_constant,
    parse_int=_integer,
    parse_float=_number,
)


def _check_tree(body: dict[str, Any], *, check_text: bool) -> None:
    """Refuse what is too deep, and text with half a surrogate pair. Iterative: depth is hostile."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                inner.extend(node.values())
                if check_text:
                    inner.extend(node)
            elif isinstance(node, list):
                # Long lists are token ids; leaves need no second look unless text is suspect.
                inner.extend(
                    x
                    for x in node
                    if isinstance(x, (dict, list)) or (check_text and type(x) is str)
                )
            elif check_text and isinstance(node, str):
                _check_text(node)
        if not inner:
            return
        level = inner
    raise InvalidRequestError(f"The body is nested deeper than {MAX_DEPTH}")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "The body holds half of a surrogate pair, which is not text"
        ) from None
