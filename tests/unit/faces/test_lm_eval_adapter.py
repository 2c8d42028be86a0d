"""The lm-eval adapter over a fake of lm-eval's base class and the fake engine of the faces."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from jaxinfer.errors import ConfigError, InvalidRequestError
from jaxinfer.llm import LLM
from tests.unit.faces.fakes import FakeEngine, loaded


class FakeLM:
    """What the adapter uses of `lm_eval.api.model.LM`."""

    def __init__(self) -> None:
        self.added: list[tuple] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *row: self.added.append(row))


@pytest.fixture
def adapter(monkeypatch):
    registry: dict[str, type] = {}

    def register_model(name):
        return lambda cls: registry.setdefault(name, cls)

    modules = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": FakeLM},
        "lm_eval.api.registry": {"register_model": register_model},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "jaxinfer.lm_eval_adapter", raising=False)
    module = importlib.import_module("jaxinfer.lm_eval_adapter")
    assert registry == {"jaxinfer": module.JaxinferLM}
    yield module
    sys.modules.pop("jaxinfer.lm_eval_adapter", None)


def instances(*args):
    return [SimpleNamespace(args=a) for a in args]


def make(adapter, engine=None, **settings):
    engine = engine or FakeEngine(max_model_len=100)
    return adapter.JaxinferLM(llm=LLM.from_loaded(loaded(engine, max_model_len=100)), **settings)


def test_pairs_are_scored_token_by_token(adapter):
    lm = make(adapter)
    pairs = [("ab", " cd"), ("", "xy"), ("a ", "b")]
    # The fake gives each token of a prompt -0.5, at rank 2; the space goes with the continuation.
    found = lm.loglikelihood(instances(*pairs))
    assert found == [(-1.5, False), (-1.0, False), (-1.0, False)]
    assert [row[:2] for row in lm.added] == [("loglikelihood", pair) for pair in pairs]


def test_a_context_that_is_too_long_loses_its_start(adapter):
    engine = FakeEngine(max_model_len=100)
    lm = make(adapter, engine)
    assert lm.max_length == 98
    assert lm.loglikelihood(instances(("a" * 300, "bcd"))) == [(-1.5, False)]
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        lm.loglikelihood(instances(("a", "b" * 99)))


@pytest.mark.parametrize("length", [0, 1, 98, 99, 500])
def test_texts_of_any_length_have_each_token_counted_once(adapter, length):
    assert make(adapter).loglikelihood_rolling(instances(("x" * length,))) == [-0.5 * length]


def test_texts_end_before_a_stop_string_or_after_enough_tokens(adapter):
    lm = make(adapter, FakeEngine(script="one. two. three", max_model_len=100), max_gen_toks=6)
    requests = instances(
        ("q", {"until": [". t", "zz"], "max_gen_toks": 30}),
        ("q", {"until": "nowhere", "do_sample": False}),
        ("q" * 300, {"until": ["."], "temperature": 0.0}),
    )
    assert lm.generate_until(requests) == ["one", "one. t", "one"]
    assert lm.generate_until([]) == []


def test_what_a_task_asks_for_in_vain_is_named(adapter):
    lm = make(adapter)
    with pytest.raises(InvalidRequestError, match="num_beams") as caught:
        lm.generate_until(instances(("q", {"until": ["."], "num_beams": 4})))
    assert caught.value.param == "num_beams"
    with pytest.raises(InvalidRequestError, match="max_gen_toks"):
        lm.generate_until(instances(("q", {"max_gen_toks": 99})))


def test_a_model_and_settings_of_another_are_refused(adapter):
    make(adapter, device="cuda:0", batch_size=1)  # what lm-eval says on any machine
    with pytest.raises(ConfigError, match="not both"):
        make(adapter, max_num_seqs=4)


def test_chat_is_rendered_by_the_models_template(adapter):
    lm = make(adapter)
    messages = [{"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(messages) == "user: hi\nassistant: "
    assert lm.apply_chat_template(messages, add_generation_prompt=False) == "user: hi\n"
    assert lm.tokenizer_name == "fake"


def test_without_lm_eval_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "jaxinfer.lm_eval_adapter", raising=False)
    with pytest.raises(ImportError, match=r"jaxinfer\[lm-eval\]"):
        importlib.import_module("jaxinfer.lm_eval_adapter")
