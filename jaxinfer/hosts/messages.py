"""What travels between hosts: a word, a number and arrays of 4-byte words, as bytes and back.

Nothing here can run code: whoever reaches the port can at worst send wrong numbers. Of an array
that was sent before under the same word and number only what changed is sent: a page table of
256 rows with room for 32k tokens has 2 MB, of which a step of decoding changes some hundred words.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_LENGTHS = struct.Struct("<II")
MAX_BYTES = 2**30
_DTYPES = ("int32", "uint32")


@dataclass(frozen=True)
class Message:
    """One call, or a word about the connection.

    Attributes:
        word: What to do.
        number: For which size, or how often.
        arrays: Of int32 or uint32, any shape; None where there is none.
        text: Settings.
    """

    word: str
    number: int = 0
    arrays: tuple[np.ndarray | None, ...] = ()
    text: str = ""


class Encoder:
    """Messages → bytes. Each connection needs all messages of one encoder, in order."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int, int], np.ndarray] = {}

    def encode(self, message: Message) -> bytes:
        parts: list[bytes] = []
        shapes = []
        for i, array in enumerate(message.arrays):
            if array is None:
                shapes.append(None)
                continue
            assert array.dtype.name in _DTYPES, array.dtype
            words = np.ascontiguousarray(array).view(np.int32).reshape(-1)
            changed = self._changed((message.word, message.number, i), words)
            shapes.append([array.dtype.name, array.shape, -1 if changed is None else len(changed)])
            if changed is None:
                parts.append(words.tobytes())
            else:
                parts += [changed.tobytes(), words[changed].tobytes()]
        head = json.dumps([message.word, message.number, shapes, message.text]).encode()
        body = b"".join(parts)
        return _LENGTHS.pack(len(head), len(body)) + head + body

    def _changed(self, key: tuple[str, int, int], words: np.ndarray) -> np.ndarray | None:
        """Return where an array differs from its predecessor; None to send all of it."""
        last, self._last[key] = self._last.get(key), words.copy()
        if last is None or last.size != words.size:
            return None
        changed = np.flatnonzero(last != words).astype(np.int32)
        return None if 2 * changed.size >= words.size else changed


class Decoder:
    """Bytes → messages.

    Args:
        read: Returns exactly so many bytes, or raises.
    """

    def __init__(self, read: Callable[[int], bytes]):
        self._read = read
        self._last: dict[tuple[str, int, int], np.ndarray] = {}

    def decode(self) -> Message:
        """Return the next message.

        Raises:
            ConnectionError: It is none of ours.
        """
        num_head, num_body = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if num_head + num_body > MAX_BYTES:
            raise ConnectionError(f"a message of {num_head + num_body} bytes: not one of ours")
        word, number, shapes, text = json.loads(self._read(num_head))
        words = np.frombuffer(self._read(num_body), np.int32)
        arrays: list[np.ndarray | None] = []
        for i, described in enumerate(shapes):
            if described is None:
                arrays.append(None)
                continue
            dtype, shape, num_changed = described
            key, size = (word, number, i), int(np.prod(shape))
            if num_changed < 0:
                whole, words = words[:size].copy(), words[size:]
            else:
                whole = self._last[key].copy()
                whole[words[:num_changed]] = words[num_changed : 2 * num_changed]
                words = words[2 * num_changed :]
            self._last[key] = whole
            # A fresh array each time: the runtime may still read the one before.
            arrays.append(whole.view(dtype).reshape(shape))
        return Message(word, number, tuple(arrays), text)
