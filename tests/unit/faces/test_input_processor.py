"""What is refused before the engine hears of it, and what the engine gets."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from jaxinfer.errors import InvalidRequestError
from jaxinfer.input_processor import InputProcessor, default_sampling_params
from jaxinfer.sampling_params import SamplingParams
from tests.unit.faces.fakes import EOS, VOCAB_SIZE, ByteTokenizer


def processor(**changes):
    settings = {"max_model_len": 100, "vocab_size": VOCAB_SIZE, "max_logprobs": 5, **changes}
    return InputProcessor(ByteTokenizer(), **settings)


@pytest.mark.parametrize(
    "prompt",
    [
        "hi",
        [104, 105],
        (104, 105),
        np.array([104, 105], np.int32),
        [np.int64(104), np.int32(105)],
        {"prompt": "hi"},
        {"prompt_token_ids": [104, 105]},
        {"prompt_token_ids": np.array([104, 105])},
        {"prompt": "shown, not run", "prompt_token_ids": [104, 105]},
    ],
    ids=repr,
)
def test_every_form_of_a_prompt_gives_the_same_tokens(prompt):
    prepared = processor().prepare("r", prompt, SamplingParams())
    assert prepared.prompt_token_ids == (104, 105)
    assert all(type(i) is int for i in prepared.prompt_token_ids)


BAD_PROMPTS = {
    "": "empty",
    (): "empty",
    None: "NoneType",
    17: "int",
    True: "bool",
    b"bytes": "bytes",
    1.5: "float",
    (1, True): "True at position 1",
    (1, 2.0): "2.0 at position 1",
    (1, "a"): "'a' at position 1",
    (1, None): "None",
    (1, (2,)): "(2,)",
    (1, -1): "-1",
    (1, VOCAB_SIZE): f"{VOCAB_SIZE}",
    "\ud800": "Unicode",
    "x" * 100: "100 tokens",
    (1,) * 101: "101 tokens",
}


@pytest.mark.parametrize("prompt, said", BAD_PROMPTS.items(), ids=lambda x: repr(x)[:30])
def test_a_bad_prompt_is_refused_by_name(prompt, said):
    inputs = processor()
    with pytest.raises(InvalidRequestError, match=re.escape(said)) as caught:
        inputs.prepare("r", prompt, SamplingParams())
    assert caught.value.param == "prompt"
    assert inputs.prepare("r", "fine", SamplingParams()).prompt == "fine"


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"prompt": None},
        {"prompt": ["a"]},
        {"prompt_token_ids": "12"},
        {"prompt_token_ids": []},
        {"prompt_token_ids": 5},
        {"prompt": 5, "prompt_token_ids": [1]},
        {"prompt": "a", "multi_modal_data": {}},
        np.zeros((2, 2), np.int32),
    ],
    ids=repr,
)
def test_a_bad_mapping_is_refused_by_name(prompt):
    with pytest.raises(InvalidRequestError) as caught:
        processor().prepare("r", prompt, SamplingParams())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"max_tokens": 99}, "max_tokens"),
        ({"min_tokens": 99, "max_tokens": None}, "min_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"bad_words_token_ids": [[VOCAB_SIZE]]}, "bad_words_token_ids"),
        ({"bad_words": ["\udc00"]}, "bad_words"),
    ],
    ids=repr,
)
def test_bad_parameters_are_refused_by_name(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        processor().prepare("r", "hi", SamplingParams(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": 7}, "request_id"),
        ({"params": {"n": 1}}, "sampling_params"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"cache_salt": None}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"prompt": {"prompt": "a", "cache_salt": 7}}, "cache_salt"),
    ],
    ids=repr,
)
def test_bad_arguments_are_refused_by_name(fields, param):
    arguments = {"request_id": "r", "prompt": "hi", "params": SamplingParams(), **fields}
    with pytest.raises(InvalidRequestError) as caught:
        processor().prepare(**arguments)
    assert caught.value.param == param


def test_the_context_error_names_all_numbers():
    with pytest.raises(InvalidRequestError) as caught:
        processor().prepare("r", "x" * 60, SamplingParams(max_tokens=50))
    assert re.findall(r"\d+", str(caught.value)) == ["100", "110", "60", "50", "40"]


def test_max_tokens_defaults_to_the_rest_of_the_context():
    prepared = processor().prepare("r", "x" * 60, SamplingParams(max_tokens=None))
    assert prepared.sample_params[0].max_tokens == 40
    assert processor().prepare("r", "x" * 99, SamplingParams(max_tokens=1))


def test_bad_words_reach_the_engine_as_token_ids():
    params = SamplingParams(bad_words=["no", "no"], bad_words_token_ids=[[1, 2]])
    sent = processor().prepare("r", "hi", params).sample_params[0]
    assert not sent.bad_words
    assert sent.bad_words_token_ids == ((1, 2), tuple(b"no"), tuple(b" no"))


def test_sample_zero_of_many_is_the_single_sample():
    one = processor().prepare("r", "hi", SamplingParams(seed=-5))
    many = processor().prepare("r", "hi", SamplingParams(seed=-5, n=4))
    assert many.seeds[0] == one.seeds[0]
    assert len(set(many.seeds)) == 4
    assert [many.sample_id(i) for i in range(4)] == ["r-0", "r-1", "r-2", "r-3"]
    assert all(p.n == 1 for p in many.sample_params)


def test_prompt_logprobs_are_computed_for_one_sample_only():
    prepared = processor().prepare("r", "hi", SamplingParams(n=3, prompt_logprobs=1))
    assert [p.prompt_logprobs for p in prepared.sample_params] == [1, None, None]


def test_unseeded_requests_differ_and_repeat_under_an_engine_seed():
    def draw(inputs):
        return [inputs.prepare("r", "hi", SamplingParams()).seeds[0] for _ in range(3)]

    free, first, second = draw(processor()), draw(processor(seed=1)), draw(processor(seed=1))
    assert len({*free, *first}) == 6
    assert first == second


def test_a_salt_in_the_prompt_wins():
    prompt = {"prompt": "hi", "cache_salt": "mine"}
    assert processor().prepare("r", prompt, SamplingParams(), cache_salt="x").cache_salt == "mine"


def test_a_conversation_becomes_text_and_ids():
    prompt = processor().chat_prompt([{"role": "user", "content": "é"}], lang="fr")
    assert prompt["prompt"] == "user: é\nlang=fr\nassistant: "
    assert bytes(prompt["prompt_token_ids"]).decode() == prompt["prompt"]
    with pytest.raises(InvalidRequestError) as caught:
        processor().chat_prompt([{"role": "user", "content": "\ud800"}])
    assert caught.value.param == "messages"


def test_defaults_come_from_the_models_makers():
    made = default_sampling_params(
        {"temperature": 0.6, "top_k": 50, "top_p": None, "eos_token_id": 2, "do_sample": True}
    )
    assert (made.temperature, made.top_k, made.top_p) == (0.6, 50, 1.0)
    assert default_sampling_params({}) == SamplingParams()


class CountingTokenizer(ByteTokenizer):
    """Notes how much text it was asked to encode."""

    num_chars = 0

    def encode(self, text, *, add_special_tokens=True):
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_text_far_over_the_context_is_refused_after_its_start():
    inputs = InputProcessor(
        tokenizer := CountingTokenizer(), max_model_len=100, vocab_size=VOCAB_SIZE, max_logprobs=5
    )
    with pytest.raises(InvalidRequestError, match="far more than 100 tokens") as caught:
        inputs.prepare("r", "x" * 10_000_000, SamplingParams())
    assert caught.value.param == "prompt" and tokenizer.num_chars < 10_000


def test_a_long_text_of_few_tokens_is_served():
    class Words(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return [65] * -(-len(text) // 1000)

    inputs = InputProcessor(Words(), max_model_len=100, vocab_size=VOCAB_SIZE, max_logprobs=5)
    assert len(inputs.prepare("r", "x" * 80_000, SamplingParams()).prompt_token_ids) == 80


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [65, 66], "bad_words_token_ids": [[65], [66]]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        (
            {"allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 1},
            "allowed_token_ids",
        ),
        ({"bad_words_token_ids": [[i] for i in range(VOCAB_SIZE)]}, "bad_words"),
    ],
)
def test_parameters_that_leave_no_token_are_refused(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        processor().prepare("r", "hi", SamplingParams(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [65, 66], "bad_words_token_ids": [[65]]},
        {"allowed_token_ids": [65, 66], "bad_words_token_ids": [[65, 66], [66, 65]]},
        {"allowed_token_ids": [EOS]},
        {"allowed_token_ids": [65], "stop_token_ids": [65]},
    ],
)
def test_parameters_that_leave_one_token_are_served(fields):
    processor().prepare("r", "hi", SamplingParams(**fields))


WRONG = [
    5, 1.5, "x", b"x", [None], [[1]], {1: 2}, {"a": 1}, True, 10**400, -(10**5000), float("nan"),
    object(), np.array([1.5]), [10**5000], {5: 10**400}, {10**400: 1}, "\ud800", 1j, iter("a"),
]  # fmt: skip


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SamplingParams)])
def test_any_value_in_any_field_is_taken_or_refused_by_name(field):
    for value in WRONG:
        try:
            params = SamplingParams(**{field: value})
            processor().prepare("r", "hi", params)
        except InvalidRequestError as error:
            related = {field, "min_tokens" if field == "max_tokens" else field}
            related |= {"max_tokens"} if field == "min_tokens" else set()
            assert error.param in related and len(str(error)) < 300


def test_numpy_numbers_are_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=np.array([1, 2])
    )
    assert params == SamplingParams(temperature=0.5, top_k=3, stop_token_ids=[1, 2])
    assert type(params.temperature) is float and type(params.top_k) is int
