"""How byte-level vocabularies cut text into words, by the names that GGUF files give to it.

A table, no logic. The expressions are those of the models' own `tokenizer.json`, in the syntax of
Oniguruma, which `tokenizers` uses too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is cut into words before the merges.

    Attributes:
        splits: Regular expressions, each cutting the pieces that the one before it left.
        ignore_merges: A word that is a token is taken whole, whatever the merges say.
        add_bos: Whether a text starts with BOS, unless the file says otherwise.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(suffix: str, digits: str) -> str:
    """Words cut where a lower-case letter meets an upper-case one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


# Letters with case, as of an older Unicode: DeepSeek's first tokenizer spells out their ranges.
_OLD_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]]"
)
_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_ASCII_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_SENTENCE_MARKS = r" ?[^(\s|.,!?…。，、।۔،)]+"

# Each entry: the names that `tokenizer.ggml.pre` may have, and what they mean.
_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum modern-bert "
        "exaone4",
        PreTokenizer(splits=(_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer(splits=(r"\p{N}", _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer(splits=(_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer(splits=(_QWEN2,)),
    ),
    ("qwen35", PreTokenizer(splits=(_QWEN35,))),
    (
        "tekken",
        PreTokenizer(splits=(_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    ),
    (
        "gpt-4o llama4 kanana2 minimax-m2",
        PreTokenizer(splits=(_cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            splits=(
                r"[\r\n]",
                rf"\s?{_OLD_CASED}+",
                r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
                r"\s+$",
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm",
        PreTokenizer(
            splits=(
                r"\p{N}{1,3}",
                r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
                _DEEPSEEK3,
            )
        ),
    ),
    ("falcon", PreTokenizer(splits=(r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "default",
        PreTokenizer(splits=(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "seed-coder",
        PreTokenizer(
            splits=(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
        ),
    ),
    ("bloom poro-chat gpt3-finnish", PreTokenizer(splits=(_SENTENCE_MARKS,))),
    ("viking", PreTokenizer(splits=(_SENTENCE_MARKS, r"\p{N}"))),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: kind for names, kind in _FAMILIES for name in names.split()
}
