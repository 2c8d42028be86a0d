"""Ids equal to those of the references; `tests/golden/text/generate.py` says which they are."""

from __future__ import annotations

import pytest

from jaxinfer.pre_tokenizers import PRE_TOKENIZERS
from tests.golden.text.corpus import KIND_TEXTS, TEXTS
from tests.unit.text.vocabularies import (
    byte_level,
    from_gguf,
    from_json,
    golden,
    sentencepiece,
    smollm2,
)

FAMILIES = {family["names"][0]: family for family in golden("pre_kinds")["families"]}


def encode_all(tokenizer, texts=TEXTS, *, add_special_tokens=True):
    return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]


@pytest.mark.real
def test_default_models_ids_equal_llama_cpp():
    assert encode_all(smollm2(), add_special_tokens=False) == golden("smollm2")["ids"]


@pytest.mark.real
def test_default_models_vocabulary_decodes_what_it_encoded():
    tokenizer = smollm2()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("source", ["json", "gguf", "round trip"])
def test_byte_level_ids_equal_transformers_and_llama_cpp(source):
    expected = golden("byte_level")
    tokenizer = {
        "json": lambda: from_json(expected["tokenizer_json"], bos_token="<|begin|>"),
        "gguf": byte_level,
        "round trip": lambda: from_json(byte_level().to_tokenizer_json()),
    }[source]()
    assert encode_all(tokenizer) == expected["ids"]
    assert [tokenizer.decode(ids) for ids in expected["ids"]] == expected["decoded"]


def test_every_pre_tokenizer_kind_has_a_golden():
    names = [name for family in FAMILIES.values() for name in family["names"]]
    assert sorted(names) == sorted(PRE_TOKENIZERS)


@pytest.mark.parametrize("kind", FAMILIES)
def test_pre_tokenizer_kinds_cut_words_as_their_references_do(kind):
    family = FAMILIES[kind]
    metadata = golden("byte_level")["metadata"] | {"tokenizer.ggml.add_bos_token": False}
    for name in family["names"]:
        ids = encode_all(from_gguf(metadata | {"tokenizer.ggml.pre": name}), KIND_TEXTS)
        assert family["transformers_ids"] in (None, ids)
        differing = [t for t, a, b in zip(KIND_TEXTS, ids, family["ids"], strict=True) if a != b]
        # llama.cpp's expression for these two splits off combining marks; the original does not.
        assert differing == ([KIND_TEXTS[11]] if kind in ("tekken", "gpt-4o") else [])


@pytest.mark.parametrize("variant", ["llama2", "gemma"])
def test_sentencepiece_ids_equal_llama_cpp_and_sentencepiece(variant):
    expected = golden("sentencepiece")["variants"][variant]
    tokenizer = sentencepiece(variant)
    assert encode_all(tokenizer) == expected["ids"]
    for text, ids in zip(TEXTS, expected["sentencepiece_ids"], strict=True):
        assert ids is None or tokenizer.encode(text, add_special_tokens=False) == ids


def test_sentencepiece_collapses_spaces_where_the_file_says_so():
    expected = golden("sentencepiece")["variants"]["collapsing"]["sentencepiece_ids"]
    tokenizer = sentencepiece("collapsing")
    for text, ids in zip(TEXTS, expected, strict=True):
        assert ids is None or tokenizer.encode(text, add_special_tokens=False) == ids


def test_sentencepiece_round_trip_through_tokenizer_json_keeps_ids():
    copy = from_json(sentencepiece().to_tokenizer_json(), **sentencepiece().tokenizer_config())
    assert encode_all(copy) == encode_all(sentencepiece())


def test_sentencepiece_tokenizer_json_of_transformers_gives_its_ids_and_texts():
    expected = golden("sentencepiece")["variants"]["llama2"]
    tokenizer = from_json(expected["tokenizer_json"], bos_token="<s>")
    assert encode_all(tokenizer) == expected["json_ids"]
    assert [tokenizer.decode(ids) for ids in expected["json_ids"]] == expected["json_decoded"]
