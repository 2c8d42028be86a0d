"""The `tokenizer.*` metadata of a GGUF file → a `tokenizers.Tokenizer`. Reads no file itself.

Two kinds of vocabulary: "gpt2", byte-level BPE whose words are cut by a regular expression that the
file only names, and "llama", SentencePiece BPE whose merges are implied by the tokens' scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jaxinfer.errors import ModelError
from jaxinfer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

# Tokens that end a turn or a text, by their spelling: a GGUF file can name only one as `eos`, and
# some files mark none of them as control tokens.
END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
    }
)


class TokenType(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the metadata describes; adding BOS is left to the caller.

    Raises:
        ModelError: The kind is unknown or the tables contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ModelError(
            f"tokenizer.ggml.model must be one of {', '.join(sorted(_BUILDERS))}, got {kind!r}; "
            "convert the model with its tokenizer.json beside the weights instead"
        )
    tokens = _tokens(metadata)
    types = _types(metadata, tokens)
    try:
        tokenizer = _BUILDERS[kind](metadata, tokens, types)
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        # `tokenizers` raises a bare Exception, for example for a merge of unknown tokens.
        raise ModelError(f"the GGUF vocabulary is inconsistent: {error}") from error
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (TokenType.CONTROL, TokenType.UNKNOWN) or token in END_TOKENS
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == TokenType.USER_DEFINED and token not in END_TOKENS
        ]
    )
    return tokenizer


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a text starts with BOS."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or _pre_tokenizer(metadata).add_bos
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    kind = _pre_tokenizer(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise ModelError(
            "tokenizer.ggml.merges must list pairs such as 'Ġ t', and is missing or not"
        )
    tokenizer = Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=kind.ignore_merges,
        )
    )
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in kind.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.scores must have one score per token ({len(tokens)}), got "
            f"{'none' if scores is None else len(scores)}"
        )
    unknown = next((t for t, type_ in zip(tokens, types, strict=True) if type_ == 2), None)
    tokenizer = Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_from_scores(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = []
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        # Not ^ and $, which here also match at line breaks inside the text.
        ends, runs = Regex(r"\A +| +\z"), Regex(" +")
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(runs, " ")]
    if add_space:
        steps.append(normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if add_space else []),
        ]
    )
    return tokenizer


def _merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a third, the best-scored third first.

    SentencePiece keeps no merges: it joins whichever neighbours give the token of highest score. Of
    several ways to one token the one with the longest left part comes first, which is the one met
    first from the left.
    """
    normal = {
        token: score
        for token, type_, score in zip(tokens, types, scores, strict=True)
        if type_ == TokenType.NORMAL
    }
    merges: list[tuple[float, int, str, str]] = []
    for token, score in normal.items():
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                merges.append((-score, -cut, left, right))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"tokenizer.ggml.pre={name!r} is an unknown way to cut words; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use the model's tokenizer.json instead."
        )
    return PRE_TOKENIZERS[name]


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = list(metadata.get("tokenizer.ggml.tokens") or ())
    if not tokens:
        raise ModelError("tokenizer.ggml.tokens is missing or empty: the file has no vocabulary")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))
        raise ModelError(f"tokenizer.ggml.tokens must differ, but {twice!r} is listed twice")
    return tokens


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.token_type must have one entry per token ({len(tokens)}), "
            f"got {len(types)}"
        )
    return [int(type_) for type_ in types]
