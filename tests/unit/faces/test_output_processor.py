"""Tokens → text, stop strings, log-probabilities and times; cumulative, delta and final alike."""

from __future__ import annotations

import random

import pytest

from jaxinfer.generation import Generation
from jaxinfer.input_processor import InputProcessor
from jaxinfer.output_processor import OutputProcessor
from jaxinfer.sampling_params import SamplingParams
from tests.unit.faces.fakes import EOS, VOCAB_SIZE, ByteTokenizer, FakeEngine

TOKENIZER = ByteTokenizer()
INPUTS = InputProcessor(TOKENIZER, max_model_len=1000, vocab_size=VOCAB_SIZE, max_logprobs=20)


def start(engine, params, outputs=None, *, prompt="hi", request_id="r", **mode):
    """Return a generation that runs in `engine`, with its output processor."""
    generation = Generation(INPUTS.prepare(request_id, prompt, params), TOKENIZER, **mode)
    outputs = OutputProcessor() if outputs is None else outputs
    outputs.add(generation)
    for sample in generation.samples:
        engine.add_request(**generation.prepared.engine_request(sample.index))
    return generation, outputs


def advance(engine, outputs):
    _, to_abort = outputs.process(engine.step())
    for name in to_abort:
        engine.abort(name)


def finish(engine, generation, outputs, read_every=1):
    """Step to the end, reading now and then; return everything read."""
    taken, number = [], 0
    while engine.has_unfinished():
        advance(engine, outputs)
        number += 1
        if number % read_every == 0 and (output := generation.take()) is not None:
            taken.append(output)
    if (output := generation.take()) is not None:
        taken.append(output)
    assert generation.take() is None
    assert taken[-1].finished and not any(t.finished for t in taken[:-1])
    return taken


def run(script, params, *, tokens_per_step=1, read_every=1, **mode):
    engine = FakeEngine(script=script, tokens_per_step=tokens_per_step)
    return finish(engine, *start(engine, params, **mode), read_every)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 50])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_text_and_tokens_however_the_tokens_come(tokens_per_step, include):
    params = SamplingParams(
        max_tokens=50, stop=["STOP"], include_stop_str_in_output=include, logprobs=0
    )
    runs = {
        mode: run("a ST STOPped STOP", params, tokens_per_step=tokens_per_step, **{mode: True})
        for mode in ("delta", "final_only")
    }
    final = runs["final_only"][-1].outputs[0]
    assert final.text == ("a ST STOP" if include else "a ST ")
    assert bytes(final.token_ids) == b"a ST STOP"
    assert (final.finish_reason, final.stop_reason) == ("stop", "STOP")
    assert len(final.logprobs) == 9
    assert final.cumulative_logprob == pytest.approx(-0.5 * 9)
    deltas = [o.outputs[0] for o in runs["delta"]]
    assert "".join(d.text for d in deltas) == final.text
    assert [i for d in deltas for i in d.token_ids] == final.token_ids
    assert [e for d in deltas for e in d.logprobs] == final.logprobs
    assert deltas[-1].cumulative_logprob == final.cumulative_logprob


def test_a_stop_string_aborts_the_engine_request():
    engine = FakeEngine(script="abcdef")
    generation, outputs = start(engine, SamplingParams(max_tokens=6, stop="c"))
    for _ in range(3):
        assert not generation.finished
        advance(engine, outputs)
    assert generation.finished and not engine.has_unfinished() and outputs.num_requests == 0


@pytest.mark.parametrize("read_every", [1, 2, 7, 1000])
def test_deltas_add_up_whatever_the_pace_of_the_reader(read_every):
    text = "naïve 🎉 テキスト, " * 3
    params = SamplingParams(max_tokens=500, logprobs=2)
    cumulative = run(text, params, read_every=read_every)
    deltas = run(text, params, read_every=read_every, delta=True)
    assert cumulative[-1].outputs[0].text == text == "".join(d.outputs[0].text for d in deltas)
    for output, parts in zip(cumulative, range(1, len(deltas) + 1), strict=True):
        joined = [d.outputs[0] for d in deltas[:parts]]
        assert output.outputs[0].text == "".join(j.text for j in joined)
        assert output.outputs[0].token_ids == [i for j in joined for i in j.token_ids]
        assert output.outputs[0].logprobs == [e for j in joined for e in j.logprobs]
    assert "\ufffd" not in "".join(d.outputs[0].text for d in deltas)


def test_what_was_read_does_not_change_afterwards():
    first, second = run("ab", SamplingParams(max_tokens=2))
    assert (first.outputs[0].text, first.outputs[0].token_ids) == ("a", [97])
    assert (second.outputs[0].text, second.outputs[0].token_ids) == ("ab", [97, 98])


@pytest.mark.parametrize(
    "fields, text, tokens, stop_reason",
    [
        ({}, "ab", [97, 98, EOS], None),
        ({"stop_token_ids": [98]}, "a", [97, 98], 98),
        ({"stop_token_ids": [98], "include_stop_str_in_output": True}, "ab", [97, 98], 98),
        ({"skip_special_tokens": False}, "ab", [97, 98, EOS], None),
        ({"detokenize": False}, "", [97, 98, EOS], None),
        ({"stop": ["b"]}, "a", [97, 98], "b"),
    ],
    ids=repr,
)
def test_a_token_that_ends_the_output_is_no_text(fields, text, tokens, stop_reason):
    (output,) = run("ab", SamplingParams(max_tokens=9, **fields), final_only=True)
    sample = output.outputs[0]
    assert (sample.text, sample.token_ids, sample.stop_reason) == (text, tokens, stop_reason)
    assert sample.finish_reason == "stop"


def test_the_end_flushes_what_looked_like_a_stop_string():
    (output,) = run("abST", SamplingParams(max_tokens=4, stop="STOP"), final_only=True)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abST", "length")


def test_logprobs_name_the_sampled_token_first_and_each_token_once():
    (output,) = run("b", SamplingParams(max_tokens=1, logprobs=3), final_only=True)
    (entry,) = output.outputs[0].logprobs
    assert [(i, e.rank, e.decoded_token) for i, e in entry.items()] == [
        (98, 2, "b"),
        (99, 1, "c"),
        (97, 3, "a"),
    ]
    (output,) = run("b", SamplingParams(max_tokens=1, logprobs=0), final_only=True)
    assert list(output.outputs[0].logprobs[0]) == [98]
    (output,) = run("b", SamplingParams(max_tokens=1), final_only=True)
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


def test_prompt_logprobs_come_once_in_deltas_and_always_otherwise():
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    for output in run("abc", params, prompt="xyz"):
        none, *entries = output.prompt_logprobs
        assert none is None
        assert [next(iter(e.values())).decoded_token for e in entries] == ["y", "z"]
        assert output.outputs[0].logprobs is None
    deltas = run("abc", params, prompt="xyz", delta=True)
    assert [d.prompt_logprobs is not None for d in deltas] == [True, False, False]


def test_samples_end_independently_and_stand_in_order():
    rng = random.Random(1)
    engine = FakeEngine(order=rng.shuffle)
    params = SamplingParams(n=4, seed=3, max_tokens=8, stop=["a", "e", "i", "o"])
    taken = finish(engine, *start(engine, params))
    assert all([s.index for s in t.outputs] == [0, 1, 2, 3] for t in taken)
    engine = FakeEngine()
    deltas = finish(engine, *start(engine, params, delta=True))
    for index, whole in enumerate(taken[-1].outputs):
        parts = [s for d in deltas for s in d.outputs if s.index == index]
        assert "".join(p.text for p in parts) == whole.text
        assert [i for p in parts for i in p.token_ids] == whole.token_ids
        assert [p.finish_reason for p in parts if p.finished] == [whole.finish_reason]


def test_an_error_ends_one_sample_and_tells_why():
    engine = FakeEngine(script="abc")
    generation, outputs = start(engine, SamplingParams(n=2, max_tokens=3))
    advance(engine, outputs)
    engine.fail_next.add("r-1")
    output = finish(engine, generation, outputs)[-1]
    assert [(s.text, s.finish_reason, s.error) for s in output.outputs] == [
        ("abc", "length", None),
        ("a", "error", "logits held a NaN"),
    ]


def test_abort_gives_what_there_is_and_drops_what_was_in_flight():
    engine = FakeEngine(script="abST")
    generation, outputs = start(engine, SamplingParams(max_tokens=9, stop="STOP"))
    for _ in range(3):
        advance(engine, outputs)
    in_flight = engine.step()
    ended, to_abort = outputs.abort("r")
    assert ended is generation and to_abort == ["r-0"]
    assert outputs.process(in_flight) == ([], [])
    output = generation.take()
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abS", "abort")
    assert output.finished and outputs.abort("r") == (None, [])


def test_a_failed_request_raises_at_its_reader():
    engine = FakeEngine()
    generation, _ = start(engine, SamplingParams())
    generation.fail(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        generation.take()


def test_the_observer_hears_each_latency_once():
    class Observer:
        def __init__(self):
            self.first, self.next, self.records = [], [], []

        def on_first_token(self, ttft_s):
            self.first.append(ttft_s)

        def on_next_tokens(self, num_tokens, interval_s):
            self.next.append((num_tokens, interval_s))

        def on_finished(self, record):
            self.records.append(record)

    observer = Observer()
    engine = FakeEngine(script="abcd", tokens_per_step=2)
    generation, outputs = start(
        engine, SamplingParams(n=2, max_tokens=4), OutputProcessor(observer), prompt="xyz"
    )
    output = finish(engine, generation, outputs)[-1]
    (record,) = observer.records
    assert len(observer.first) == 1 and observer.first[0] == record.ttft_s >= 0
    assert [n for n, _ in observer.next] == [2, 2]
    assert all(s >= 0 for _, s in observer.next)
    assert record.finish_reasons == ("length", "length")
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (3, 3)
    assert record.num_generation_tokens == (4, 4)
    assert record.ttft_s + record.decode_s <= record.e2e_s
    times = output.metrics
    assert times.arrival_time <= times.first_token_time <= times.last_token_time
    assert times.last_token_time <= times.finished_time and output.num_cached_tokens == 3


def test_an_aborted_request_that_never_ran_has_no_latencies():
    records = []

    class Observer:
        on_finished = records.append

    engine = FakeEngine()
    _, outputs = start(engine, SamplingParams(), OutputProcessor(Observer()))
    outputs.abort("r")
    assert records[0].finish_reasons == ("abort",)
    assert records[0].ttft_s is records[0].queue_s is records[0].decode_s is None
