"""The offline API over a fake engine: order, errors, interrupts, defaults."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest

from jaxinfer.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.unit.faces.fakes import FakeEngine, loaded

SHORT = SamplingParams(max_tokens=5, seed=1)


def make(engine=None, **changes):
    return LLM.from_loaded(loaded(engine or FakeEngine(), **changes))


def texts(outputs):
    return [[s.text for s in o.outputs] for o in outputs]


def test_results_come_in_the_order_of_the_prompts_however_they_finish():
    rng = random.Random(2)
    prompts = [f"prompt {i}" for i in range(40)]
    params = [SamplingParams(seed=i, max_tokens=1 + rng.randrange(20)) for i in range(40)]
    llm = make(FakeEngine(order=rng.shuffle, max_num_seqs=7))
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    alone = [make().generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    assert texts(outputs) == texts(alone)
    assert all(
        o.finished and len(o.outputs[0].token_ids) == q.max_tokens
        for o, q in zip(outputs, params, strict=True)
    )


def test_one_prompt_and_a_list_of_one_give_the_same():
    llm = make()
    whole = texts(llm.generate("hi", SHORT))
    forms = [["hi"], [104, 105], [[104, 105]], np.array([104, 105]), [np.array([104, 105])]]
    forms += [{"prompt": "hi"}, [{"prompt_token_ids": [104, 105]}], np.array([[104, 105]])]
    for form in forms:
        assert texts(llm.generate(form, SHORT)) == whole, form
    assert llm.generate([], SHORT) == []


def test_n_samples_differ_and_the_first_is_the_single_one():
    llm = make()
    (many,) = llm.generate("hi", SamplingParams(n=3, seed=5, max_tokens=8))
    (one,) = llm.generate("hi", SamplingParams(seed=5, max_tokens=8))
    assert len({s.text for s in many.outputs}) == 3
    assert many.outputs[0].text == one.outputs[0].text


def test_a_seed_of_the_engine_makes_a_run_repeatable():
    free = SamplingParams(max_tokens=8)
    runs = [texts(make(seed=s).generate(["a", "a", "b"], free)) for s in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]
    assert texts(make().generate("a", free)) != texts(make().generate("a", free))


@pytest.mark.parametrize("bad", ["", [], [300], [True], 5, None, {"text": "x"}, "x" * 999])
def test_one_bad_prompt_names_its_index_and_nothing_runs(bad):
    engine = FakeEngine()
    llm = make(engine)
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: ") as caught:
        llm.generate(["good", bad, "good"], SHORT)
    assert engine.added == []
    assert caught.value.param == ("max_tokens" if bad == "x" * 999 else "prompt")
    assert llm.generate("good", SHORT)[0].finished


def test_a_prompt_that_only_the_engine_refuses_takes_the_batch_back():
    engine = FakeEngine(num_pages=5)
    llm = make(engine)
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: the prompt can never fit"):
        llm.generate(["good", "too long"], SHORT)
    assert not engine.live and engine.stats.num_steps == 0
    assert llm.generate("good", SHORT)[0].finished


@pytest.mark.parametrize("number", [0, 1, 3])
def test_parameters_must_match_the_prompts_in_number(number):
    llm = make()
    with pytest.raises(InvalidRequestError, match=f"2 prompts or one for each, got {number}"):
        llm.generate(["a", "b"], [SHORT] * number)
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: sampling_params"):
        llm.generate(["a"], [{"n": 1}])
    assert len(llm.generate(["a", "b"], [SHORT] * 2)) == 2


def test_the_models_defaults_apply_where_none_are_given():
    engine = FakeEngine()
    seen = []
    add = engine.add_request
    engine.add_request = lambda **request: (seen.append(request["params"]), add(**request))
    llm = make(engine, generation_config={"temperature": 0.3, "top_k": 7})
    llm.generate("hi")
    assert (seen[0].temperature, seen[0].top_k, seen[0].max_tokens) == (0.3, 7, 16)
    assert llm.get_default_sampling_params().temperature == 0.3


def test_more_prompts_than_the_queue_holds_are_fed_in_turn():
    llm = make(FakeEngine(max_waiting=3))
    assert len(llm.generate(["a"] * 20, SamplingParams(n=2, max_tokens=2))) == 20


def test_chat_takes_one_conversation_or_several():
    llm = make(FakeEngine(script="hello"))
    talk = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(talk, SHORT)
    assert one.prompt == "user: hi\nassistant: " and one.outputs[0].text == "hello"
    two = llm.chat([talk, talk], SHORT, add_generation_prompt=False, lang="fr")
    assert [o.prompt for o in two] == ["user: hi\nlang=fr\n"] * 2
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]: messages: unknown role"):
        llm.chat([talk, [{"role": "x", "content": ""}]], SHORT)


def interrupt_by_signal(number):
    if number == 2:
        signal.raise_signal(signal.SIGINT)


def interrupt_by_exception(number):
    if number == 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize("interrupt", [interrupt_by_signal, interrupt_by_exception])
def test_an_interrupt_aborts_the_batch_and_the_next_call_works(interrupt):
    engine = FakeEngine(on_step=interrupt)
    llm = make(engine)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], SHORT)
    # Held back until the step in flight was done, if it came as a signal.
    assert engine.stats.num_steps == (3 if interrupt is interrupt_by_signal else 2)
    assert not engine.live and len(engine.aborted) == 3
    assert signal.getsignal(signal.SIGINT) is before
    engine.on_step = lambda number: None
    assert texts(llm.generate("a", SHORT)) == texts(make().generate("a", SHORT))


def test_an_interrupt_during_the_last_step_is_not_lost():
    llm = make(
        FakeEngine(on_step=lambda number: number == 4 and signal.raise_signal(signal.SIGINT))
    )
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SHORT)


def test_the_second_interrupt_acts_at_once():
    def twice(number):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second was held back")

    with pytest.raises(KeyboardInterrupt):
        make(FakeEngine(on_step=twice)).generate("a", SHORT)


def test_a_broken_engine_stays_broken_and_says_why():
    def breaks(number):
        raise ZeroDivisionError("page of nobody")

    llm = make(FakeEngine(on_step=breaks))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="page of nobody"):
            llm.generate("a", SHORT)


def test_integrity_is_checked_when_the_batch_is_done():
    engine = FakeEngine()
    llm = make(engine)
    llm.generate(["a", "b"], SHORT)
    assert engine.num_checks == 1
    engine.corrupt = True
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="two owners"):
            llm.generate("a", SHORT)


def test_after_shutdown_nothing_is_served():
    engine = FakeEngine()
    with make(engine) as llm:
        llm.generate("a", SHORT)
    llm.shutdown()
    assert engine.closed
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a", SHORT)


def test_the_bar_shows_progress_when_asked(capsys):
    llm = make()
    llm.generate(["a", "b"], SHORT)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], SHORT, use_tqdm="always")
    shown = capsys.readouterr()
    assert "2/2" in shown.err and "tok/s" in shown.err and shown.out == ""


def test_an_unknown_setting_is_refused_with_a_hint():
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM("model", max_model_length=5)
    with pytest.raises(ConfigError, match="trust_remote_code.*the settings are"):
        LLM("model", trust_remote_code=True)
