"""How a prompt that is too long may be cut. Token ids and text; knows no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

# No vocabulary has longer tokens, those of many spaces included.
_MOST_CHARS_PER_TOKEN = 256


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """How a prompt that is too long may be cut.

    Attributes:
        keep: Tokens that are left, a BOS in front of them included.
        side: The end that is cut off, "left" or "right".
    """

    keep: int
    side: str = "left"

    def cut_text(self, text: str) -> str:
        """Return as much of a text as can matter, so that a huge one need not be encoded."""
        num_chars = _MOST_CHARS_PER_TOKEN * self.keep
        if len(text) <= num_chars:
            return text
        return text[-num_chars:] if self.side == "left" else text[:num_chars]

    def cut(self, token_ids: list[int], bos_token_id: int | None) -> list[int]:
        """Return at most `keep` of the tokens; a BOS in front stays in front."""
        if len(token_ids) <= self.keep:
            return token_ids
        if self.side == "right":
            return token_ids[: self.keep]
        if self.keep > 1 and token_ids[0] == bos_token_id:
            return [token_ids[0], *token_ids[1 - self.keep :]]
        return token_ids[-self.keep :]
