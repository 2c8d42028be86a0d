"""Token id → bytes: the inverse of how a vocabulary spells its tokens, one token at a time.

`tokenizers` decodes whole sequences only, and to text. A stream needs each token by itself, and in
bytes, because a token may end in the middle of a character.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from jaxinfer.errors import ModelError


class TokenPieces:
    """Token id → bytes, worked out when first asked for.

    Attributes:
        strips_leading_space: See `Tokenizer`.
        literal: Tokens whose text is what it looks like: added ones, which no merge has made.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self._replacements: list[tuple[str, str]] = []
        self._byte_of: dict[str, int] | None = None
        self._byte_fallback = False
        self.strips_leading_space = False
        self.literal: set[int] = set()
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self._read(json.loads(state))
        if self._byte_of is not None:
            self.literal |= set(backend.get_added_tokens_decoder())

    def __getitem__(self, token_id: int) -> bytes:
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._bytes(token_id)
        return data

    def _bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if token_id in self.literal:
            return token.encode()
        if self._byte_of is not None:
            values = [self._byte_of.get(character, -1) for character in token]
            return token.encode() if -1 in values else bytes(values)
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token) if self._byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    def _read(self, decoder: Any) -> None:
        match decoder:
            case {"type": "Sequence", "decoders": steps}:
                for step in steps:
                    self._read(step)
            case {"type": "ByteLevel"}:
                self._byte_of = {chr(c): byte for byte, c in _byte_alphabet().items()}
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.strips_leading_space = True
            case {"type": "Metaspace", "replacement": mark, **rest}:
                self._replacements.append((mark, " "))
                self.strips_leading_space = rest.get("prepend_scheme", "always") != "never"
            case _:
                raise ModelError(
                    f"tokenizer.json: the decoder {json.dumps(decoder)} is unknown here; expected "
                    "ByteLevel, Metaspace, or SentencePiece's Replace, ByteFallback, Fuse and Strip"
                )


def _byte_alphabet() -> dict[int, int]:
    """Return GPT-2's spelling of bytes: printable ones as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {b: b for b in printable} | {byte: 0x100 + i for i, byte in enumerate(rest)}
