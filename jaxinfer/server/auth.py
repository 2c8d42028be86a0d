"""Who may ask: compares the key of a request with those of the server. Knows no endpoint's work."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer.server.errors import UnauthorizedError, error_reply


class Auth:
    """Lets requests with a valid key through, and any request for an open path.

    Args:
        app: What is guarded.
        keys: All valid ones.
        open_paths: What needs no key; every other path does, whether it exists or not.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str]):
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._admits(scope):
            await self._app(scope, receive, send)
            return
        given = _key_of(Headers(scope=scope))
        error = UnauthorizedError(
            "You didn't provide an API key; send it as Authorization: Bearer KEY"
            if given is None
            else "Incorrect API key provided; ask the operator of this server for one"
        )
        await error_reply(error).response(scope["path"])(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if scope["path"] in self._open_paths:
            return True
        given = _key_of(Headers(scope=scope))
        return given is not None and self._is_valid(given)

    def _is_valid(self, given: str) -> bool:
        """Compare with all keys, in a time that tells nothing: neither which, nor how far."""
        digest, valid = _digest(given), False
        for known in self._digests:
            valid |= hmac.compare_digest(digest, known)
        return valid


def _key_of(headers: Headers) -> str | None:
    """Return the key as OpenAI's clients send it, or as Anthropic's and llama.cpp's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def _digest(key: str) -> bytes:
    # Of one length, so that the comparison does not tell the key's.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
