"""Joined deltas equal the one-shot text, whatever the tokens, the stops and the pushes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.detokenizer import Detokenizer
from tests.golden.text.corpus import TEXTS
from tests.unit.text.vocabularies import byte_level, sentencepiece, smollm2

VOCABULARIES = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without prefix": lambda: sentencepiece("gemma"),
    "real": smollm2,
}
REAL = pytest.param("real", marks=pytest.mark.real)
each_vocabulary = pytest.mark.parametrize("vocabulary", [*list(VOCABULARIES)[:-1], REAL])


class Bytes:
    """Token i is byte i; 256 is special."""

    special_token_ids = frozenset({256})
    strips_leading_space = False

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b"<end>"


def stream(tokenizer, pushes, **settings):
    detokenizer = Detokenizer(tokenizer, **settings)
    deltas = [detokenizer.push(ids) for ids in pushes]
    return detokenizer, [*deltas, detokenizer.push([], finished=True)]


def cut_at_first_stop(text, stops, *, include):
    """The rule, spelled out: the match that ends first, of those the longest."""
    for end in range(len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            stop = max(matches, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def split(data, ids):
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8).map(sorted), label="cuts")
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def draw_ids(data, tokenizer):
    """Random ids, most of them meaningless bytes, beside text as a model would write it."""
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    written = st.sampled_from(TEXTS).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)[:40]
    )
    parts = data.draw(st.lists(anything | written, max_size=3), label="ids")
    return [token_id for part in parts for token_id in part]


@each_vocabulary
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_equal_the_one_shot_text(vocabulary, data, skip):
    tokenizer = VOCABULARIES[vocabulary]()
    ids = draw_ids(data, tokenizer)
    detokenizer, deltas = stream(tokenizer, split(data, ids), skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.text == "".join(deltas)
    assert detokenizer.num_tokens_used == len(ids)


@each_vocabulary
@given(data=st.data(), include=st.booleans())
def test_text_is_cut_exactly_at_the_first_match(vocabulary, data, include):
    tokenizer = VOCABULARIES[vocabulary]()
    ids = draw_ids(data, tokenizer)
    full = tokenizer.decode(ids)
    # Pieces of the text itself, so that matches are common, and near misses.
    start = st.integers(0, max(len(full) - 1, 0))
    pieces = st.builds(lambda i, n: full[i : i + n], start, st.integers(1, 9)).filter(bool)
    stops = data.draw(st.lists(pieces | st.text("ab \ufffd", min_size=1, max_size=4), max_size=4))
    detokenizer, deltas = stream(
        tokenizer, split(data, ids), stop=stops, include_stop_str_in_output=include
    )
    expected, stop = cut_at_first_stop(full, stops, include=include)
    assert "".join(deltas) == expected
    assert detokenizer.stop_reason == stop
    if stop is not None:
        # The last token used is the one whose text completed the match.
        used = detokenizer.num_tokens_used
        partial, _ = stream(tokenizer, [ids[: used - 1]], stop=stops)
        flushed_only = partial.num_tokens_used == used - 1 and partial.stop_reason is not None
        assert partial.stop_reason is None or flushed_only


@given(
    st.lists(st.sampled_from("ab"), max_size=40).map("".join),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.data(),
)
def test_overlapping_stop_strings_do_not_depend_on_the_split(text, stops, data):
    ids = list(text.encode())
    detokenizer, deltas = stream(Bytes(), split(data, ids), stop=stops)
    expected, stop = cut_at_first_stop(text, stops, include=False)
    assert ("".join(deltas), detokenizer.stop_reason) == (expected, stop)


@given(st.binary(max_size=60), st.data())
def test_arbitrary_bytes_decode_as_a_whole_would(raw, data):
    _, deltas = stream(Bytes(), split(data, list(raw)))
    assert "".join(deltas) == raw.decode(errors="replace")


@given(st.binary(max_size=60))
def test_only_bytes_that_may_still_become_a_character_are_kept_back(raw):
    detokenizer = Detokenizer(Bytes())
    for i, byte in enumerate(raw):
        detokenizer.push([byte])
        rest = raw[: i + 1].decode(errors="replace")
        missing = len(rest) - len(detokenizer.text)
        assert rest.startswith(detokenizer.text)
        assert missing in (0, 1)
        if missing:
            # Some continuation would make it a character.
            assert rest.endswith("\ufffd")


def test_character_comes_whole_with_its_last_byte():
    detokenizer = Detokenizer(Bytes())
    assert [detokenizer.push([b]) for b in "é你😀".encode()] == [
        *("", "é"),
        *("", "", "你"),
        *("", "", "", "😀"),
    ]


def test_byte_that_can_never_be_utf8_is_replaced_at_once():
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push([0x80]) == "\ufffd"
    assert detokenizer.push([0xFF, 0x41]) == "\ufffdA"
    # The start of a character that the next byte breaks off.
    assert detokenizer.push([0xE4]) == ""
    assert detokenizer.push([0x41]) == "\ufffdA"


def test_broken_tail_comes_out_at_the_end_only():
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push(b"ok\xf0\x9f") == "ok"
    assert detokenizer.push([], finished=True) == "\ufffd"


def test_special_token_between_the_bytes_of_a_character_is_skipped_over():
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push([0xC3, 256, 0xA9]) == "é"
    shown = Detokenizer(Bytes(), skip_special_tokens=False)
    assert shown.push([0xC3, 256]) == "\ufffd<end>"


class TestHolding:
    def test_only_text_that_may_become_a_stop_string_is_kept_back(self):
        detokenizer = Detokenizer(Bytes(), stop=["END", "\n\n"])
        assert detokenizer.push(b"The E") == "The "
        assert detokenizer.push(b"N") == ""
        assert detokenizer.push(b"E") == "EN"
        assert detokenizer.push(b"x\n") == "Ex"
        assert detokenizer.push(b"y") == "\ny"

    def test_kept_back_text_comes_out_at_the_end(self):
        detokenizer = Detokenizer(Bytes(), stop=["END"])
        assert detokenizer.push(b"EN") == ""
        assert detokenizer.push([], finished=True) == "EN"
        assert detokenizer.stop_reason is None

    def test_nothing_comes_after_the_stop_string(self):
        detokenizer = Detokenizer(Bytes(), stop=["abc"])
        assert detokenizer.push(b"xxabcyy") == "xx"
        assert detokenizer.stop_reason == "abc"
        assert detokenizer.num_tokens_used == 5
        assert detokenizer.push(b"zz") == ""
        assert detokenizer.push([], finished=True) == ""
        assert detokenizer.text == "xx"

    def test_stop_string_may_stay_in_the_text(self):
        detokenizer = Detokenizer(Bytes(), stop=["bc"], include_stop_str_in_output=True)
        assert detokenizer.push(b"ab") == "a"
        assert detokenizer.push(b"cd") == "bc"

    def test_stop_string_across_a_character_of_several_bytes(self):
        detokenizer = Detokenizer(Bytes(), stop=["é!"])
        assert "".join(detokenizer.push([b]) for b in "caféé!x".encode()) == "café"

    def test_flushed_replacement_character_can_complete_a_stop_string(self):
        detokenizer = Detokenizer(Bytes(), stop=["\ufffd"])
        assert detokenizer.push([0x41, 0xE4]) == "A"
        assert detokenizer.push([], finished=True) == ""
        assert detokenizer.stop_reason == "\ufffd"


class TestLeadingSpace:
    def test_is_a_word_mark_after_nothing(self):
        tokenizer = sentencepiece()
        ids = tokenizer.encode("the world", add_special_tokens=False)
        _, deltas = stream(tokenizer, [ids])
        assert "".join(deltas) == "the world"

    def test_separates_words_after_a_prompt(self):
        tokenizer = sentencepiece()
        prompt = tokenizer.encode("hello")
        ids = tokenizer.encode("the world", add_special_tokens=False)
        _, deltas = stream(tokenizer, [ids], prompt_token_ids=prompt)
        assert "".join(deltas) == " the world"
        whole = tokenizer.decode(prompt + ids)
        assert whole == tokenizer.decode(prompt) + "".join(deltas)

    def test_is_a_word_mark_after_bos_alone(self):
        tokenizer = sentencepiece()
        ids = tokenizer.encode("the", add_special_tokens=False)
        _, deltas = stream(tokenizer, [ids], prompt_token_ids=[tokenizer.bos_token_id])
        assert "".join(deltas) == "the"

    @each_vocabulary
    @given(data=st.data())
    def test_prompt_and_output_join_to_the_whole_text(self, vocabulary, data):
        tokenizer = VOCABULARIES[vocabulary]()
        texts = st.sampled_from([t for t in TEXTS if t.isascii()])
        prompt = tokenizer.encode(data.draw(texts), add_special_tokens=False)
        ids = tokenizer.encode(data.draw(texts), add_special_tokens=False)
        _, deltas = stream(tokenizer, split(data, ids), prompt_token_ids=prompt)
        assert tokenizer.decode(prompt + ids) == tokenizer.decode(prompt) + "".join(deltas)


def test_cost_of_a_token_does_not_grow_with_the_text():
    stops = ["a" * 1000 + "b", "ab" * 500 + "c", "\n\nEND"]

    def cpu_seconds(length):
        detokenizer = Detokenizer(Bytes(), stop=stops)
        start = time.process_time()
        for _ in range(length):
            detokenizer.push([0x61])
        return time.process_time() - start

    small = min(cpu_seconds(3_000) for _ in range(3))
    assert cpu_seconds(30_000) < 40 * small + 0.05


@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 8))
def test_stop_string_counts_only_behind_the_first_min_tokens(data, include, min_tokens):
    text = data.draw(st.text("ab", max_size=12), label="text")
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), label="stops")
    settings = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    pushes = split(data, list(text.encode()))
    detokenizer, deltas = stream(Bytes(), pushes, **settings)
    expected, stop = text, None
    for end in range(min_tokens + 1, len(text) + 1):
        if matches := [s for s in stops if text[:end].endswith(s)]:
            stop = max(matches, key=len)
            expected = text[:end] if include else text[: end - len(stop)]
            break
    assert ("".join(deltas), detokenizer.stop_reason) == (expected, stop)
