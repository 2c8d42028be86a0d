from __future__ import annotations

import pytest

from jaxinfer.errors import ModelError
from tests.unit.text.vocabularies import byte_level, from_gguf, golden, sentencepiece

BYTE_LEVEL = golden("byte_level")["metadata"]
SENTENCEPIECE = golden("sentencepiece")["metadata"]


def without(metadata, key):
    return {k: v for k, v in metadata.items() if k != key}


def test_unknown_pre_tokenizer_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ModelError, match=r"pre='nonsense'.*known are .*llama-bpe.*smollm"):
        from_gguf(BYTE_LEVEL | {"tokenizer.ggml.pre": "nonsense"})


def test_missing_pre_tokenizer_is_the_default_one():
    named = from_gguf(BYTE_LEVEL | {"tokenizer.ggml.pre": "default"})
    missing = from_gguf(without(BYTE_LEVEL, "tokenizer.ggml.pre"))
    assert missing.encode("1234 (x)=y") == named.encode("1234 (x)=y")


def test_unknown_model_kind_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ModelError, match="one of gpt2, llama, got 't5'"):
        from_gguf(BYTE_LEVEL | {"tokenizer.ggml.model": "t5"})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (BYTE_LEVEL | {"tokenizer.ggml.merges": []}, "merges"),
        (BYTE_LEVEL | {"tokenizer.ggml.merges": ["ab"]}, "merges"),
        (BYTE_LEVEL | {"tokenizer.ggml.merges": ["Q Qnever"]}, "inconsistent"),
        (BYTE_LEVEL | {"tokenizer.ggml.token_type": [1, 1]}, "token_type .* got 2"),
        (SENTENCEPIECE | {"tokenizer.ggml.scores": [0.0]}, "scores .* got 1"),
        (without(SENTENCEPIECE, "tokenizer.ggml.scores"), "scores .* got none"),
        (BYTE_LEVEL | {"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' is listed twice"),
        (without(BYTE_LEVEL, "tokenizer.ggml.tokens"), "no tokenizer"),
    ],
)
def test_contradicting_tables_are_named_errors(metadata, message):
    with pytest.raises(ModelError, match=message):
        from_gguf(metadata)


def test_bos_default_follows_the_kind_and_the_file_overrules_it():
    bos = byte_level().bos_token_id
    assert byte_level().encode("x")[0] == bos
    assert from_gguf(BYTE_LEVEL | {"tokenizer.ggml.pre": "smollm"}).encode("x")[0] != bos
    off = {"tokenizer.ggml.add_bos_token": False}
    assert from_gguf(BYTE_LEVEL | off).encode("x")[0] != bos
    assert from_gguf(SENTENCEPIECE).encode("x")[0] == sentencepiece().bos_token_id
    assert from_gguf(SENTENCEPIECE | off).encode("x")[0] != sentencepiece().bos_token_id


def test_end_of_turn_token_is_special_though_the_file_calls_it_plain():
    tokens = BYTE_LEVEL["tokenizer.ggml.tokens"]
    types = list(BYTE_LEVEL["tokenizer.ggml.token_type"])
    end = tokens.index("<|im_end|>")
    types[end] = 1
    tokenizer = from_gguf(BYTE_LEVEL | {"tokenizer.ggml.token_type": types})
    assert tokenizer.encode("hi<|im_end|>")[-1] == end
    assert end in tokenizer.special_token_ids
    assert end in tokenizer.eos_token_ids


def test_big_sentencepiece_vocabulary_is_built_in_seconds():
    """Gemma's size: 262,144 tokens of up to 16 characters, most of them made of two others."""
    letters = "abcdefgh"
    words = [""]
    while len(words) < 2 * 262_144:
        words += [w + c for w in words[-(8 ** len(words[-1])) :] for c in letters]
    tokens = ["<unk>", "<s>", "</s>", *(w for w in words[1:262_142])]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = from_gguf(metadata)
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.decode(tokenizer.encode("abcdefgh" * 3)) == "abcdefgh" * 3
