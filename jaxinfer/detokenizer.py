"""Token ids → text deltas of one sample. Knows characters and stop strings, no model and no HTTP.

Three things may keep text back, and nothing else does: a character whose bytes have not all come,
text that may still become a stop string, and, at the very start, a space that only marks a word.
Every token costs the same, however long the text already is.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol


class TokenSource(Protocol):
    """What a detokenizer needs to know of a tokenizer.

    Attributes:
        special_token_ids: Left out of the text under `skip_special_tokens`.
        strips_leading_space: Whether a text starts without the space that its first token carries,
            as SentencePiece's `▁Hello` does.
    """

    @property
    def special_token_ids(self) -> Collection[int]: ...

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """The text of one sample as it grows. The deltas of `push`, joined, are the whole text.

    Bytes that can never become UTF-8 turn into U+FFFD at once. Stop strings are looked for one
    character at a time, so the result depends neither on how the text is cut into tokens nor on how
    the tokens are cut into pushes: the match that completes first wins, and of those that complete
    with the same character the longest.

    Args:
        tokenizer: Whose tokens they are.
        skip_special_tokens: Leave special tokens out of the text.
        stop: Strings that end the text.
        include_stop_str_in_output: End the text after the stop string instead of before it.
        min_tokens: A stop string that one of the first so many tokens completes does not count.
        prompt_token_ids: What the text continues. Only after an empty prompt is the output's first
            space SentencePiece's word mark; otherwise it separates two words and stays.

    Attributes:
        stop_reason: The stop string that ended the text; after it nothing more comes out.
        num_tokens_used: Tokens pushed, up to the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: TokenSource,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ):
        self.stop_reason: str | None = None
        self.num_tokens_used = 0
        self._tokenizer = tokenizer
        self._skipped: Collection[int] = tokenizer.special_token_ids if skip_special_tokens else ()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Longest first: among stop strings that complete together the first one found wins.
        self._stops = [_StopString(s) for s in sorted(set(stop), key=len, reverse=True)]
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._strip_space = tokenizer.strips_leading_space and not any(
            self._bytes(token_id) for token_id in prompt_token_ids
        )
        self._held = ""
        self._emitted: list[str] = []

    @property
    def text(self) -> str:
        """All that came out so far."""
        return "".join(self._emitted)

    def push(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """Take in tokens and return the text that is now certain.

        Args:
            token_ids: The sample's next tokens.
            finished: No more will come: whatever was kept back comes out, half a character as
                U+FFFD.
        """
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens_used += 1
            self._take(self._characters(self._token(token_id)))
        if self.stop_reason is None and finished:
            self._take(self._utf8.decode(b"", final=True))
        return self._emit(everything=finished or self.stop_reason is not None)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)

    def _token(self, token_id: int) -> bytes:
        data = self._bytes(token_id)
        if data and self._strip_space:
            self._strip_space = False
            return data.removeprefix(b" ")
        return data

    def _characters(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        # Python waits for the third byte of a surrogate (ED A0 … ED BF), which is never UTF-8.
        kept, _ = self._utf8.getstate()
        if len(kept) == 2 and b"\xed\xa0" <= kept <= b"\xed\xbf":
            text += self._utf8.decode(b"", final=True)
        return text

    def _take(self, text: str) -> None:
        if not self._stops:
            self._held += text
            return
        for i, character in enumerate(text):
            # Every matcher has to see the character, also after one of them has matched.
            complete = [s for s in self._stops if s.advance(character)]
            if complete and self.num_tokens_used > self._min_tokens:
                stop = complete[0].string
                self.stop_reason = stop
                self._held += text[: i + 1]
                if not self._include_stop:
                    self._held = self._held[: -len(stop)]
                return
        self._held += text

    def _emit(self, *, everything: bool) -> str:
        keep = 0 if everything else max((s.num_matched for s in self._stops), default=0)
        cut = len(self._held) - keep
        delta, self._held = self._held[:cut], self._held[cut:]
        if delta:
            self._emitted.append(delta)
        return delta


class _StopString:
    """Knuth, Morris and Pratt's matcher: one character at a time, never looking back.

    Attributes:
        string: What is looked for.
        num_matched: Length of the longest start of `string` that the text seen so far ends with:
            just what has to be kept back.
    """

    def __init__(self, string: str):
        self.string = string
        self.num_matched = 0
        self._fallback = _fallbacks(string)

    def advance(self, character: str) -> bool:
        """Read one character; return whether it completes the string."""
        n = self.num_matched
        while n and self.string[n] != character:
            n = self._fallback[n]
        if self.string[n] == character:
            n += 1
        if n == len(self.string):
            self.num_matched = self._fallback[n]
            return True
        self.num_matched = n
        return False


def _fallbacks(string: str) -> list[int]:
    """Return, for each n, the length of the longest proper start of `string[:n]` that ends it."""
    lengths = [0, 0]
    n = 0
    for character in string[1:]:
        while n and string[n] != character:
            n = lengths[n]
        if string[n] == character:
            n += 1
        lengths.append(n)
    return lengths
