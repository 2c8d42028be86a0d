"""What of a request's body decides where it goes: the text that its prompt begins with, in pieces.

Knows neither tokens nor templates: equal beginnings of a conversation's JSON are equal beginnings
of its prompt, and that is all a router needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

PIECE_CHARS = 64
"""About 16 tokens of English: the default size of a page."""

MAX_PIECES = 2048
# In the order in which templates use them.
_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")


def prefix_hashes(body: Mapping[str, Any]) -> list[bytes]:
    """Return the chained hashes of a request's prompt, one for each `PIECE_CHARS` characters."""
    text = "".join(
        json.dumps(body[name], ensure_ascii=False, sort_keys=True)
        for name in _FIELDS
        if body.get(name)
    )
    salt = json.dumps([body.get("model"), body.get("cache_salt")])
    digest = blake2b(salt.encode("utf-8", "replace"), digest_size=16).digest()
    hashes = []
    for start in range(0, min(len(text), MAX_PIECES * PIECE_CHARS) - PIECE_CHARS + 1, PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS].encode("utf-8", "replace")
        digest = blake2b(digest + piece, digest_size=16).digest()
        hashes.append(digest)
    return hashes
