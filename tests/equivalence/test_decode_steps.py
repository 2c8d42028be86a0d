"""Several decode steps in one dispatch give the tokens that one step after the other gives."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest

from jaxinfer import step_timer
from jaxinfer.engine import Engine
from jaxinfer.request import FinishReason
from jaxinfer.sampling_params import SamplingParams
from tests.engines import Work, make_engine, run, run_alone, run_tokens, tokens_of

MOST = 8
SHAPES = {"buckets": (8, 64), "max_model_len": 128}
"""All engines of a model share these programs, whatever their settings."""


@pytest.fixture(autouse=True)
def all_the_time_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timer, "MAX_DISPATCH_S", 1e6)


def engine_with(model: str, num_decode_steps: int, **settings) -> Engine:
    engine = make_engine(model, **SHAPES, num_decode_steps=MOST, **settings)
    engine._timer = step_timer.StepTimer(num_decode_steps)
    return engine


def mixed_work(count: int = 20) -> dict[str, Work]:
    """Return requests that end at different times and for different reasons."""
    rng = np.random.default_rng(7)
    kinds = itertools.cycle(
        [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 1.0, "stop_token_ids": tuple(range(3, 9))},
            {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "logprobs": 2},
            # More ends than a row can name on the device.
            {"temperature": 1.0, "stop_token_ids": tuple(range(3, 60))},
            {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.8},
            {"temperature": 1.0, "stop_token_ids": tuple(range(3, 160)), "min_tokens": 11},
            {"temperature": 0.0, "logit_bias": {7: 3.0, 11: -5.0}},
            {"temperature": 0.9, "allowed_token_ids": list(range(3, 90)), "ignore_eos": True},
        ]
    )
    work = {}
    for i in range(count):
        prompt = tuple(int(t) for t in rng.integers(3, 320, int(rng.integers(1, 50))))
        params = SamplingParams(max_tokens=int(rng.integers(11, 48)), **next(kinds))
        work[f"r{i}"] = Work(prompt, params, seed=1000 + i)
    return work


@functools.cache
def expected(model: str) -> tuple[dict[str, Work], dict[str, list[int]]]:
    work = mixed_work()
    return work, run_alone(engine_with(model, 1, overlap=False, enable_prefix_caching=False), work)


def run_as_they_come(
    engine: Engine, work: dict[str, Work], aborted: tuple[str, ...] = ()
) -> dict[str, list[int]]:
    """Return the tokens of requests that arrive by twos, in the middle of others' steps."""
    waiting = list(work.items())
    tokens: dict[str, list[int]] = {name: [] for name in work}
    for step in itertools.count():
        if step % 5 == 0:
            for name, w in waiting[:2]:
                engine.add_request(name, w.prompt, w.params, seed=w.seed)
            del waiting[:2]
        if not waiting and not engine.has_unfinished():
            break
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            # The dispatch in flight has several tokens of it.
            if output.request_id in aborted and len(tokens[output.request_id]) > 3:
                engine.abort(output.request_id)
        engine.check_integrity()
    assert engine.stats.num_pages_used == 0
    return tokens


@pytest.mark.parametrize("num_decode_steps", [4, MOST])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False},
        {"enable_prefix_caching": False},
        {"num_pages": 20},
        {"num_pages": 20, "overlap": False},
    ],
    ids=["overlapped", "plain", "uncached", "preempted", "preempted plain"],
)
def test_requests_get_the_tokens_of_single_steps(num_decode_steps: int, settings) -> None:
    work, single = expected("smollm2")
    engine = engine_with("smollm2", num_decode_steps, **settings)
    assert run_as_they_come(engine, work) == single
    assert engine.stats.num_multi_steps > 4
    assert run_tokens(engine, work) == single  # all at once, and from the prefix cache
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in settings)


def test_windows_move_along_with_the_steps() -> None:
    work, single = expected("gemma3")
    engine = engine_with("gemma3", MOST, num_pages=64, num_window_pages=40)
    assert run_as_they_come(engine, work) == single
    assert engine.stats.num_multi_steps > 10


def test_an_abort_in_the_middle_of_a_dispatch_hurts_nobody() -> None:
    work, single = expected("smollm2")
    aborted = tuple(name for name in list(work)[::3] if len(single[name]) > 16)
    engine = engine_with("smollm2", MOST)
    tokens = run_as_they_come(engine, work, aborted)
    for name in work:
        assert tokens[name] == single[name][: len(tokens[name])]
        assert (len(tokens[name]) == len(single[name])) == (name not in aborted)
    assert engine.stats.finished[FinishReason.ABORT] == len(aborted) > 0


def test_logprobs_come_with_their_tokens() -> None:
    params = SamplingParams(temperature=1, max_tokens=20, logprobs=3, ignore_eos=True)
    work = {f"r{i}": Work(tuple(range(5 + i, 25)), params, seed=i) for i in range(3)}
    outputs = [run(engine_with("smollm2", steps), work) for steps in (1, MOST)]
    for name in work:
        single, multi = ([e for o in outs[name] for e in o.logprobs] for outs in outputs)
        assert [e.top_token_ids for e in multi] == [e.top_token_ids for e in single]
        assert [e.rank for e in multi] == [e.rank for e in single]
        np.testing.assert_allclose(
            [e.logprob for e in multi], [e.logprob for e in single], atol=1e-5
        )


def test_steps_go_together_only_while_nobody_waits_or_needs_the_host() -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    engine = engine_with("smollm2", MOST, overlap=False)
    engine.add_request("a", (5, 6, 7), params)
    sizes = [len(engine.step()[0].new_token_ids) for _ in range(4)]
    assert sizes == [1, 1, MOST, MOST]  # the prompt, a step to take the time of, then several
    engine.add_request("b", (5, 6, 8), params)
    assert [len(output.new_token_ids) for output in engine.step()] == [1, 1]
    phrase = SamplingParams(temperature=0, max_tokens=9, bad_words_token_ids=((5, 6, 7),))
    engine.add_request("c", (5, 6, 9), phrase)
    sizes = {len(out.new_token_ids) for _ in range(9) for out in engine.step()}
    assert sizes == {1}
    assert max(len(output.new_token_ids) for output in engine.step()) == MOST


def test_a_dispatch_ends_with_its_last_row() -> None:
    """Three tokens and an end: the loop must not run on over rows that have ended."""
    engine = engine_with("smollm2", MOST, overlap=False)
    runner, fetched = engine.runner, []
    fetch = runner.fetch
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    tokens = run_tokens(engine, {"a": Work((5, 6, 7), params)})["a"]
    stop = tokens[5]
    assert stop not in tokens[:5], "pick another prompt"
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(stop,))

    def watch(plan, step):
        if step.counts is not None:
            fetched.append(jax.device_get(step.sampled.token_ids)[:, 0])
        return fetch(plan, step)

    runner.fetch = watch
    try:
        got = run_tokens(engine, {"a": Work((5, 6, 7), params)})["a"]
    finally:
        del runner.fetch
    assert got == tokens[:6]
    (ids,) = fetched
    assert ids.tolist() == [*tokens[1:6], 0, 0, 0]


def test_the_cache_is_not_copied() -> None:
    """Temporaries of the decode loop do not grow with the pages."""

    def temp_bytes(num_pages: int) -> tuple[int, int]:
        engine = make_engine("smollm2", num_pages=num_pages, max_num_seqs=4, num_decode_steps=4)
        programs = engine.runner.programs
        cache_bytes = sum(x.nbytes for x in jax.tree.leaves(engine.runner._cache))
        compiled = programs.compiled["decode", 4]
        return compiled.memory_analysis().temp_size_in_bytes, cache_bytes

    (few, few_bytes), (many, many_bytes) = temp_bytes(256), temp_bytes(1024)
    assert many_bytes == 4 * few_bytes
    assert many - few < 0.01 * few_bytes


def test_what_a_request_computed_last_is_found_by_the_next_turn() -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    hits = []
    for steps in (1, MOST):
        engine = engine_with("smollm2", steps)
        prompt = tuple(range(10, 37))
        answer = run(engine, {"a": Work(prompt, params)})["a"]
        turn = (*prompt, *tokens_of(answer), 7)
        before = engine.stats.prefix_cache_hits
        run(engine, {"b": Work(turn, params)})
        hits.append(engine.stats.prefix_cache_hits - before)
    # 57 tokens, of which the last was sampled and never computed: 7 pages of 8, and the last of
    # them was filled by the last dispatch.
    assert hits == [56, 56]
