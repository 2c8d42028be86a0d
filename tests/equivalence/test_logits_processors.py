"""Processors keep their state through every way of scheduling, and disturb nobody beside them."""

from __future__ import annotations

import asyncio
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import step_timer
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.batch import ScheduledRow
from jaxinfer.builtin_processors import typical_p, xtc
from jaxinfer.errors import InvalidRequestError
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.processing import ProcessorKind, load_states, process, store_states
from jaxinfer.processor_slots import MAX_PROCESSORS, ProcessorSlots
from jaxinfer.sampler import History
from jaxinfer.sampling_params import SamplingParams
from tests.engines import Work, make_engine, run_alone, run_tokens
from tests.fakes import make_request
from tests.unit.faces.tiny import tiny_llm

MOST = 8


def count_up(logits, state):
    """Force the token that the state names, then the next one: the output shows the state."""
    forced = jnp.where(jnp.arange(logits.shape[0], dtype=jnp.int32) == state["next"], 50.0, -50.0)
    return forced.astype(jnp.float32), {**state, "next": state["next"] + state["by"]}


def follow(logits, state, row):
    """Force the successor of the last token: the output shows the tokens that were seen."""
    last = row.token_ids[row.num_tokens - 1]
    return jnp.full_like(logits, -50.0).at[last + 1].set(50.0), state


def nothing(logits, state):
    return logits, state


def counting(start: int, by: int = 1) -> LogitsProcessor:
    return LogitsProcessor(count_up, {"next": start, "by": by})


FOLLOW, NOTHING = LogitsProcessor(follow), LogitsProcessor(nothing)
SET = (counting(0), FOLLOW, typical_p(), xtc())
SHAPES = {
    "buckets": (8,),
    "max_num_batched_tokens": 8,
    "max_model_len": 128,
    "num_decode_steps": MOST,
}


@pytest.fixture(autouse=True)
def all_the_time_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timer, "MAX_DISPATCH_S", 1e6)


def engine_with(num_decode_steps: int = MOST, **settings):
    engine = make_engine("smollm2", logits_processors=SET, **SHAPES, **settings)
    engine._timer = step_timer.StepTimer(num_decode_steps)
    return engine


def params(*processors, **fields) -> SamplingParams:
    fields = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **fields}
    return SamplingParams(logits_processors=processors, **fields)


def mixed_work() -> tuple[dict[str, Work], dict[str, list[int]]]:
    """Return requests with and without processors, and what those with known outputs must get."""
    rng = np.random.default_rng(5)
    work, known = {}, {}
    for i in range(15):
        prompt = tuple(int(t) for t in rng.integers(3, 90, int(rng.integers(4, 40))))
        n = int(rng.integers(12, 40))
        kinds = [
            params(counting(30 + i, 2), max_tokens=n, temperature=float(i % 2)),
            params(FOLLOW, max_tokens=n),
            params(max_tokens=n, temperature=1.0),
            params(typical_p(0.5), xtc(0.6, 0.02), max_tokens=n, temperature=1.3),
            params(FOLLOW, xtc(0.0), max_tokens=n, repetition_penalty=0.8),
        ]
        name = f"r{i}"
        work[name] = Work(prompt, kinds[i % 5], seed=100 + i)
        if i % 5 == 0:
            known[name] = [30 + i + 2 * k for k in range(n)]
        if i % 5 in (1, 4):
            known[name] = [prompt[-1] + 1 + k for k in range(n)]
    return work, known


@pytest.fixture(scope="module")
def alone():
    work, known = mixed_work()
    engine = engine_with(1, overlap=False, enable_prefix_caching=False)
    return work, known, run_alone(engine, work)


@pytest.mark.parametrize("num_decode_steps", [1, MOST])
@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": False}, {"num_pages": 20}, {"num_pages": 20, "overlap": False}],
    ids=["overlapped", "plain", "preempted", "preempted plain"],
)
def test_states_go_with_their_requests(alone, num_decode_steps, settings):
    work, known, expected = alone
    engine = engine_with(num_decode_steps, **settings)
    tokens = run_tokens(engine, work)
    for name in known:
        assert tokens[name] == known[name], name
    assert tokens == expected
    assert (engine.stats.num_multi_steps > 2) == (num_decode_steps > 1)
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in settings)


def test_parameters_may_have_any_values_without_a_compile(alone):
    work, *_ = alone
    engine = engine_with()
    run_tokens(engine, work)
    engine.warmed_up()
    before = engine.stats.compilations_total
    p = params(typical_p(0.123), xtc(0.9, 0.3), temperature=2.0)
    run_tokens(engine, {"a": Work((5, 6, 7), p), "b": Work((5, 6), params(counting(9, 3)))})
    assert engine.stats.compilations_after_warmup == 0
    assert engine.stats.compilations_total == before


def test_a_first_use_after_warm_up_is_counted_once():
    def seven(logits, state):
        return jnp.full_like(logits, -50.0).at[7].set(50.0), state

    p = params(LogitsProcessor(seven), max_tokens=3)
    engine = make_engine("smollm2", **{**SHAPES, "num_decode_steps": 1})
    engine.warmed_up()
    assert run_tokens(engine, {"a": Work((5, 6), p)}) == {"a": [7, 7, 7]}
    assert engine.stats.compilations_after_warmup > 0
    engine.warmed_up()
    run_tokens(engine, {"a": Work((5, 6), p), "b": Work((7, 6), p)})
    assert engine.stats.compilations_after_warmup == 0


def test_programs_of_steps_without_processors_do_not_know_of_any():
    with_set, without = (
        engine.runner.programs.compiled
        for engine in (engine_with(), make_engine("smollm2", **SHAPES))
    )
    for key in (("sampler", 8), ("decode", 8)):
        assert with_set.lower(key).as_text() == without.lower(key).as_text()
    assert with_set.keys() == without.keys()


def test_samples_of_one_prompt_have_states_of_their_own_and_streams_get_every_token():
    with tiny_llm(logits_processors=SET, **SHAPES) as llm:
        (output,) = llm.generate([[5, 6, 7]], params(counting(40), n=3, max_tokens=9))
        assert [o.token_ids for o in output.outputs] == [list(range(40, 49))] * 3
        loaded = types.SimpleNamespace(
            engine=llm._engine,
            tokenizer=llm.tokenizer,
            config=llm.config,
            name="tiny",
            generation_config={},
        )
        engine = AsyncEngine(loaded)

        async def stream() -> list[int]:
            tokens: list[int] = []
            async for part in engine.generate([5, 6, 7], params(counting(60)), delta=True):
                tokens += part.outputs[0].token_ids
            return tokens

        assert asyncio.run(stream()) == list(range(60, 80))
        engine.shutdown()


def test_what_is_ruled_out_stays_ruled_out():
    allowed = [11, 12, 13]
    p = params(counting(300), allowed_token_ids=allowed)
    tokens = run_tokens(engine_with(), {"a": Work((5, 6), p)})["a"]
    assert set(tokens) <= set(allowed)


def test_rows_without_a_processor_keep_their_logits_bitwise():
    logits = np.random.default_rng(0).normal(size=(4, 60)).astype(np.float32)
    logits[0, 3] = -np.inf
    kinds = [ProcessorKind.of(p)[0] for p in SET]
    leaves = tuple(tuple(np.stack([a] * 4) for a in ProcessorKind.of(p)[1]) for p in SET)
    uses = np.zeros((len(SET), 4), bool)
    uses[:, 2] = True
    inputs = types.SimpleNamespace(
        seeds=jnp.zeros((4, 2), jnp.uint32),
        positions=jnp.full(4, 5, jnp.int32),
        prompt_lens=jnp.full(4, 2, jnp.int32),
    )
    history = History(
        token_pages=jnp.arange(16, dtype=jnp.int32).reshape(2, 8),
        page_table=jnp.zeros((4, 1), jnp.int32),
        seq_lens=jnp.full(4, 5, jnp.int32),
    )
    out, states = jax.jit(lambda x, s, u: process(kinds, x, s, u, inputs, history))(
        jnp.asarray(logits), leaves, jnp.asarray(uses)
    )
    rows = [0, 1, 3]
    np.testing.assert_array_equal(np.asarray(out)[rows], logits[rows])
    assert not np.array_equal(np.asarray(out)[2], logits[2])
    assert np.asarray(states[0][1]).tolist() == [0, 0, 1, 0]  # `next`, of the row that counts


def test_a_request_that_lost_its_slot_finds_its_state_again():
    slots = ProcessorSlots(1, 60, 8, jnp.asarray)
    slots.add_kinds([counting(0)])
    requests = {
        name: make_request(name, [1, 2], logits_processors=[counting(start)], max_tokens=50)
        for name, start in (("a", 100), ("b", 200))
    }

    def step(name: str, keep: bool = True) -> int:
        """Sample one token; if it is not kept, the request was preempted in the meantime."""
        request = requests[name]
        row = ScheduledRow(request, request.num_tokens - 1, 1, True, 0)
        packed, initial = slots.pack([row], 1)
        positions = jnp.asarray([row.end], jnp.int32)
        (state,) = load_states(slots.stored, initial, jnp.asarray(packed), positions)
        value = int(state[1][0])
        after = ((state[0], state[1] + 1),)
        slots.stored = store_states(slots.stored, after, jnp.asarray(packed), positions)
        if keep:
            request.num_pending_tokens += 1
            request.append(7)
        return value

    order = "aab?bba!aabab"
    counts = {"a": itertools.count(100), "b": itertools.count(200)}
    for name in order:
        if name in "?!":  # sampled, dropped, and sampled again at the next turn
            who = {"?": "b", "!": "a"}[name]
            assert step(who, keep=False) == step(who, keep=False)
        else:
            assert step(name) == next(counts[name])


def wrong_shape(logits, state):
    return logits[1:], state


def wrong_state(logits, state):
    return logits, 3


def failing(logits, state):
    raise RuntimeError("oh no")


def one_argument(logits):
    return logits


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([wrong_shape], "wrong_shape must return"),
        ([wrong_state], "the state was"),
        ([failing], "oh no"),
        ([LogitsProcessor(nothing, {"a": "text"})], "must hold numbers"),
    ],
)
def test_faulty_functions_are_the_callers_error_before_anything_runs(processors, message):
    engine = engine_with()
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.add_request("a", (5, 6), params(*processors))
    assert caught.value.param == "logits_processors"
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    "make",
    [
        lambda: params(one_argument),
        lambda: params(NOTHING, nothing),
        lambda: params(7),
        lambda: SamplingParams(logits_processors=nothing),
    ],
)
def test_what_is_no_list_of_processors_is_refused(make):
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.param == "logits_processors"


def test_functions_made_anew_for_each_request_come_to_an_end():
    slots = ProcessorSlots(1, 60, 8, jnp.asarray)
    for _ in range(MAX_PROCESSORS):
        slots.add_kinds([LogitsProcessor(lambda x, s: (x, s))])
    with pytest.raises(InvalidRequestError, match="module level"):
        slots.add_kinds([LogitsProcessor(lambda x, s: (x, s))])
