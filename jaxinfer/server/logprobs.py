"""The engine's log-probabilities → the three shapes of the API.

JSON has no infinities: they are written -9999.0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxinfer.detokenizer import Detokenizer
from jaxinfer.outputs import Logprob
from jaxinfer.replicas import ServingEngine
from jaxinfer.server.protocol import RequestFields
from jaxinfer.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from jaxinfer.tokenizer import Tokenizer

# The field's number for "as good as impossible", and for a value that is none.
LOWEST_LOGPROB = -9999.0

type Entry = Mapping[int, Logprob]


class LogprobFormatter:
    """Shapes log-probabilities for one HTTP request.

    Args:
        tokenizer: Spells tokens.
        num_top: How many of the likeliest are shown at each position.
        as_token_ids: Spell a token as `token_id:123`: two ids may have the same text.
        always: Token ids that are shown at each position, however unlikely.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_top: int,
        as_token_ids: bool = False,
        always: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_token_ids = as_token_ids
        self._always = frozenset(always)

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], offsets: Sequence[int]
    ) -> CompletionLogprobs:
        """Return parallel lists; an entry that is None, the first of a prompt, becomes null.

        Args:
            token_ids: The tokens that stand there.
            entries: Per token, itself and the likeliest.
            offsets: Per token, where it starts in the returned text.
        """
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry, offset in zip(token_ids, entries, offsets, strict=False):
            token = self._spell(token_id)
            result.tokens.append(token)
            result.text_offset.append(offset)
            if entry is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            own = finite(entry[token_id].logprob)
            top = {token: own}
            for i, candidate in self._shown(entry):
                name, value = self._spell(i), finite(candidate.logprob)
                # Two ids of one spelling share a key; the likelier one is what readers look for.
                top[name] = max(value, top.get(name, value))
            result.token_logprobs.append(own)
            result.top_logprobs.append(top)
        return result

    def chat(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> ChatLogprobs:
        """Return one record per token."""
        content = []
        for token_id, entry in zip(token_ids, entries, strict=False):
            own = self._top(token_id, entry[token_id])
            top = [self._top(i, lp) for i, lp in self._shown(entry)]
            content.append(
                TokenLogprob(
                    token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top
                )
            )
        return ChatLogprobs(content=content)

    def _shown(self, entry: Entry) -> list[tuple[int, Logprob]]:
        top = _likeliest(entry, self._num_top)
        if not self._always:
            return top
        shown = {i for i, _ in top}
        return top + [(i, lp) for i, lp in entry.items() if i in self._always - shown]

    def _top(self, token_id: int, logprob: Logprob) -> TopLogprob:
        # The real bytes, not those of U+FFFD: clients join them to characters that span tokens.
        raw = list(self._tokenizer.token_bytes(token_id))
        return TopLogprob(token=self._spell(token_id), logprob=finite(logprob.logprob), bytes=raw)

    def _spell(self, token_id: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)


class TextOffsets:
    """Where the tokens of one choice start in its text.

    Told by the text as it is returned and not by the tokens' spellings: those have one U+FFFD or
    more for a character that spans tokens, and special tokens have one although they may be left
    out of the text. A token that starts inside a character gets that character's offset.

    Args:
        tokenizer: Of the model.
        skip_special_tokens: Whether they are left out of the output's text.
        prompt_token_ids: What the output continues.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ):
        self._tokenizer = tokenizer
        self._num_chars = 0
        self._output = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the offsets of an echoed prompt, whose text goes before the output's."""
        offsets, end = [], 0
        detokenizer = Detokenizer(self._tokenizer)
        for token_id in token_ids:
            offsets.append(min(end, len(text)))
            if token_id in self._tokenizer.special_token_ids:
                # Spelled out by the caller, or added by the tokenizer and not part of the text.
                spelling = self._tokenizer.token_text(token_id)
                end += len(spelling) if text.startswith(spelling, end) else 0
            else:
                end += len(detokenizer.push([token_id]))
        self._num_chars += len(text)
        return offsets

    def of_output(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens of the output."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(self._output.push([token_id]))
        return offsets


def choice_formatter(
    engine: ServingEngine, body: RequestFields, num_top: int | None
) -> LogprobFormatter:
    """Return the formatter that a request asks for."""
    return LogprobFormatter(
        engine.tokenizer,
        num_top=num_top or 0,
        as_token_ids=bool(body.return_tokens_as_token_ids),
        always=body.logprob_token_ids or (),
    )


def prompt_logprobs(
    token_ids: Sequence[int], entries: Iterable[Entry | None], num_top: int
) -> PromptLogprobs:
    """Return vLLM's shape: per position a mapping of token id to record, the first null."""
    result: PromptLogprobs = []
    for token_id, entry in zip(token_ids, entries, strict=False):
        if entry is None:
            result.append(None)
            continue
        shown = {token_id: entry[token_id]} | dict(_likeliest(entry, num_top))
        result.append(
            {
                i: PromptLogprob(
                    logprob=finite(lp.logprob), rank=lp.rank, decoded_token=lp.decoded_token
                )
                for i, lp in shown.items()
            }
        )
    return result


def finite(logprob: float) -> float:
    """Return a value that JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def _likeliest(entry: Entry, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` likeliest; an entry also holds the token that stands there."""
    ranked = [(i, lp) for i, lp in entry.items() if lp.rank is not None and lp.rank <= count]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)[:count]
