from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import TextAssets
from jaxinfer.errors import ChatTemplateError, InvalidRequestError, ModelError
from jaxinfer.tokenizer import Tokenizer
from tests.golden.text.corpus import TEXTS
from tests.unit.text.vocabularies import (
    byte_level,
    from_gguf,
    from_json,
    golden,
    sentencepiece,
    smollm2,
)

BYTE_LEVEL_JSON = golden("byte_level")["tokenizer_json"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
VOCABULARIES = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without prefix": lambda: sentencepiece("gemma"),
}


@pytest.fixture(params=VOCABULARIES)
def tokenizer(request):
    return VOCABULARIES[request.param]()


class TestBos:
    def test_comes_once_in_front_of_a_text(self, tokenizer):
        ids = tokenizer.encode("hello")
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer.encode("hello", add_special_tokens=False) == ids[1:]

    def test_is_all_there_is_of_an_empty_text(self, tokenizer):
        assert tokenizer.encode("") == [tokenizer.bos_token_id]
        assert tokenizer.encode("", add_special_tokens=False) == []

    def test_is_not_doubled_where_the_text_spells_it(self, tokenizer):
        bos = tokenizer.token_text(tokenizer.bos_token_id)
        assert tokenizer.encode(f"{bos}hello").count(tokenizer.bos_token_id) == 1

    def test_comes_once_from_a_chat_template_that_writes_it(self):
        tokenizer = from_json(BYTE_LEVEL_JSON, bos_token="<|begin|>", chat_template=TEMPLATE)
        ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
        assert ids.count(tokenizer.bos_token_id) == 1
        # The same text sent to completions gets no second one either.
        text = tokenizer.render_chat([{"role": "user", "content": "hello"}])
        assert tokenizer.encode(text) == ids

    @pytest.mark.parametrize("add", [True, False])
    def test_tokenizer_config_overrules_the_post_processor(self, add):
        tokenizer = from_json(BYTE_LEVEL_JSON, bos_token="<|begin|>", add_bos_token=add)
        assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) is add

    def test_is_found_in_the_post_processor_if_nothing_names_it(self):
        assert from_json(BYTE_LEVEL_JSON).bos_token_id == byte_level().bos_token_id


class TestEndOfTurn:
    def test_ids_of_all_sources_count(self):
        text = TextAssets(
            tokenizer_json=BYTE_LEVEL_JSON,
            tokenizer_config={"eos_token": {"content": "<|endoftext|>", "special": True}},
        )
        tokenizer = Tokenizer.from_assets(text, {"eos_token_id": 5}, {"eos_token_id": [7, 9]})
        named = {tokenizer.encode(t)[1] for t in ("<|endoftext|>", "<|im_end|>")}
        assert tokenizer.eos_token_ids == {5, 7, 9, *named}

    def test_gguf_eot_and_eom_count(self):
        metadata = golden("byte_level")["metadata"] | {
            "tokenizer.ggml.eot_token_id": 11,
            "tokenizer.ggml.eom_token_id": 12,
        }
        assert {11, 12} < from_gguf(metadata).eos_token_ids

    def test_ids_outside_the_vocabulary_do_not_count(self):
        text = TextAssets(tokenizer_json=BYTE_LEVEL_JSON)
        tokenizer = Tokenizer.from_assets(text, {"eos_token_id": [10**6, -1]}, {})
        assert max(tokenizer.eos_token_ids) < tokenizer.vocab_size
        assert min(tokenizer.eos_token_ids) >= 0

    @pytest.mark.parametrize("value", ["x", 1.5, True, {}, ["x"], [None, 2.0]])
    @pytest.mark.parametrize("generation", [False, True])
    def test_what_is_no_id_is_refused(self, value, generation):
        text = TextAssets(tokenizer_json=BYTE_LEVEL_JSON)
        configs = ({}, {"eos_token_id": value}) if generation else ({"eos_token_id": value}, {})
        with pytest.raises(ModelError, match="eos_token_id must be"):
            Tokenizer.from_assets(text, *configs)

    def test_a_null_id_is_no_id(self):
        Tokenizer.from_assets(TextAssets(tokenizer_json=BYTE_LEVEL_JSON), {"eos_token_id": None})

    @pytest.mark.real
    def test_default_model_ends_turns_with_im_end(self):
        assert 2 in smollm2().eos_token_ids
        assert smollm2().token_text(2) == "<|im_end|>"


class TestDecoding:
    def test_equals_the_librarys_on_the_corpus(self, tokenizer):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            for skip in (True, False):
                expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected

    @given(st.data())
    def test_of_byte_level_ids_equals_the_librarys_also_for_broken_utf8(self, data):
        tokenizer = byte_level()
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)

    def test_of_sentencepiece_bytes_keeps_whole_characters_beside_broken_ones(self):
        tokenizer = sentencepiece("gemma")
        byte = tokenizer._backend.token_to_id
        ids = [byte(f"<0x{b:02X}>") for b in ("你".encode() + b"\xff")]
        assert tokenizer.decode(ids) == "你\ufffd"

    def test_text_survives_the_round_trip(self, tokenizer):
        for text in TEXTS:
            if "▁" in text:
                continue  # SentencePiece's own mark for a space
            ids = tokenizer.encode(text, add_special_tokens=False)
            # A prefix space after each special token is what Llama 2's vocabulary writes.
            spaced = tokenizer.strips_leading_space and any(
                s in text for s in ("<s>", "</s>", "<unk>", "<tool>")
            )
            if not spaced:
                assert tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_bytes_of_unknown_ids_are_empty(self, tokenizer):
        for unknown in (-1, tokenizer.vocab_size, 2**40):
            assert tokenizer.token_bytes(unknown) == b""

    def test_token_text_marks_half_a_character(self):
        tokenizer = byte_level()
        first_byte = tokenizer.encode("\U00012000", add_special_tokens=False)[0]
        assert tokenizer.token_bytes(first_byte)[0] == 0xF0
        assert "\ufffd" in tokenizer.token_text(first_byte)

    def test_added_token_is_literal_even_in_letters_that_spell_bytes(self):
        tokens = [*golden("byte_level")["metadata"]["tokenizer.ggml.tokens"], "Ġéé"]
        types = [*golden("byte_level")["metadata"]["tokenizer.ggml.token_type"], 4]
        tokenizer = from_gguf(
            golden("byte_level")["metadata"]
            | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
        )
        ids = tokenizer.encode("aĠééb", add_special_tokens=False)
        assert len(tokens) - 1 in ids
        assert tokenizer.decode(ids) == "aĠééb"


class TestBadWords:
    def test_nothing_but_the_word_is_banned(self, tokenizer):
        prompt = tokenizer.encode("x", add_special_tokens=False)
        texts = {tokenizer.decode(prompt + i) for i in tokenizer.encode_bad_word("the")}
        assert "xthe" in texts
        assert texts <= {"xthe", "x the"}

    @pytest.mark.parametrize("word", ["hello", " world", "two words", "😀", "(", "é"])
    def test_word_is_found_wherever_it_is_written(self, tokenizer, word):
        sequences = tokenizer.encode_bad_word(word)
        for text in (f"a {word.strip()}", f"a\a{word.strip()}"):
            ids = tokenizer.encode(text)
            assert any(ids[-len(s) :] == s for s in sequences), (text, ids, sequences)

    def test_sequence_that_covers_another_stands_alone(self):
        tokenizer = sentencepiece()
        # A space of its own before the bytes of an unknown character.
        sequences = tokenizer.encode_bad_word("\U00012000")
        assert len(sequences) == 1


class TestInput:
    def test_half_a_surrogate_pair_is_the_requests_error(self, tokenizer):
        with pytest.raises(InvalidRequestError, match="surrogate") as caught:
            tokenizer.encode("ab\ud83d")
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize("text", [None, 3, b"bytes", ["list"]])
    def test_other_types_are_the_requests_error(self, tokenizer, text):
        with pytest.raises(InvalidRequestError, match="must be a string"):
            tokenizer.encode(text)

    def test_half_a_surrogate_pair_in_a_chat_names_the_messages(self):
        tokenizer = from_json(BYTE_LEVEL_JSON, chat_template=TEMPLATE)
        with pytest.raises(ChatTemplateError) as caught:
            tokenizer.encode_chat([{"role": "user", "content": "\udc00"}])
        assert caught.value.param == "messages"

    @pytest.mark.parametrize("unit", ["a", " ", "\n", "1", "Aa", "你好", "word ", "=-", "😀"])
    def test_time_grows_with_the_length_and_not_its_square(self, tokenizer, unit):
        def cpu_seconds(length: int) -> float:
            text = unit * (length // len(unit))
            start = time.process_time()
            tokenizer.encode(text)
            return time.process_time() - start

        small = min(cpu_seconds(20_000) for _ in range(3))
        # Ten times the text: 100 times the time if it were quadratic.
        assert cpu_seconds(200_000) < 40 * small + 0.05


class TestAssets:
    def test_no_tokenizer_at_all_says_what_was_expected(self):
        with pytest.raises(ModelError, match=r"expected tokenizer\.json"):
            Tokenizer.from_assets(TextAssets(), {}, {})

    def test_broken_tokenizer_json_is_a_model_error(self):
        with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
            from_json("{}")

    def test_unknown_decoder_is_refused_by_name(self):
        state = json.loads(BYTE_LEVEL_JSON) | {"decoder": {"type": "CTC", "pad_token": "<pad>"}}
        state["decoder"] |= {"word_delimiter_token": "|", "cleanup": True}
        with pytest.raises(ModelError, match="CTC"):
            from_json(json.dumps(state))

    def test_truncation_and_padding_of_the_file_are_ignored(self):
        state = json.loads(BYTE_LEVEL_JSON)
        state["truncation"] = {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        assert len(from_json(json.dumps(state)).encode("one two three four")) > 2

    def test_settings_survive_the_round_trip(self):
        metadata = golden("byte_level")["metadata"] | {"tokenizer.chat_template": TEMPLATE}
        first = from_gguf(metadata)
        second = from_json(first.to_tokenizer_json(), **first.tokenizer_config())
        messages = [{"role": "user", "content": "hello"}]
        assert second.encode_chat(messages) == first.encode_chat(messages)
        assert second.encode("hello") == first.encode("hello")
        for name in ("bos_token_id", "eos_token_ids", "special_token_ids", "vocab_size"):
            assert getattr(second, name) == getattr(first, name)

    def test_template_file_comes_before_the_configured_one(self):
        text = TextAssets(
            tokenizer_json=BYTE_LEVEL_JSON,
            tokenizer_config={"chat_template": "old"},
            chat_template="new",
        )
        tokenizer = Tokenizer.from_assets(text, {}, {})
        assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "new"

    def test_named_templates_are_chosen_by_whether_there_are_tools(self):
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "with tools"},
        ]
        tokenizer = from_json(BYTE_LEVEL_JSON, chat_template=named)
        messages = [{"role": "user", "content": ""}]
        assert tokenizer.render_chat(messages) == "plain"
        assert tokenizer.render_chat(messages, tools=[{"type": "function"}]) == "with tools"
        assert tokenizer.tokenizer_config()["chat_template"] == named

    def test_model_without_template_refuses_messages(self, tokenizer):
        assert not tokenizer.has_chat_template
        with pytest.raises(ChatTemplateError, match="no chat template"):
            tokenizer.render_chat([{"role": "user", "content": "hi"}])
