"""Several engines behind one face, over engines in pure Python."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jaxinfer.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ReplicaDeadError,
)
from jaxinfer.metrics import EngineStats, summed
from jaxinfer.replicas import Replicas
from jaxinfer.sampling_params import SamplingParams
from tests.unit.faces.fakes import FakeEngine, loaded

TIMEOUT_S = 20.0
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


class Gate:
    """Holds an engine before its next step until it is opened; then fails it if told so."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.error: Exception | None = None

    def __call__(self, number: int) -> None:
        assert self.opened.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error


def replicas(*engines: FakeEngine, **settings) -> Replicas:
    return Replicas([loaded(engine, page_size=4, num_pages=64, **settings) for engine in engines])


async def final(face: Replicas, prompt, params=PARAMS, **options):
    async for output in face.generate(prompt, params, final_only=True, **options):
        return output
    raise AssertionError("no result")


def run(work):
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


def test_answers_are_those_of_one_engine_and_equal_prefixes_share_a_replica():
    async def both(face):
        prompts = [f"{name} {'x' * 40} {i}" for i in range(3) for name in ("first", "other")]
        return [(await final(face, prompt)).outputs[0].token_ids for prompt in prompts]

    engines = [FakeEngine(), FakeEngine()]
    face, single = replicas(*engines), replicas(FakeEngine())
    try:
        assert run(both(face)) == run(both(single))
        assert [len(engine.added) for engine in engines] == [3, 3]
        assert face.num_live_requests == 0 and face.stats.num_steps == sum(
            engine.stats.num_steps for engine in engines
        )
    finally:
        face.shutdown()
        single.shutdown()
    assert all(engine.closed for engine in engines)


def test_a_burst_is_spread_and_each_request_is_aborted_where_it_runs():
    gates = [Gate(), Gate()]
    engines = [FakeEngine(on_step=gate) for gate in gates]
    face = replicas(*engines)

    async def burst():
        tasks = [
            asyncio.ensure_future(final(face, str(i) * 12, request_id=str(i))) for i in range(8)
        ]
        while face.num_live_requests < 8:
            await asyncio.sleep(0)
        assert [engine.num_live_requests for engine in face.engines] == [4, 4]
        with pytest.raises(InvalidRequestError, match="in use"):
            await final(face, "again", request_id="3")
        face.abort("3")
        face.abort("never seen")
        for gate in gates:
            gate.opened.set()
        return [(await task).outputs[0].finish_reason for task in tasks]

    try:
        reasons = run(burst())
    finally:
        face.shutdown()
    assert reasons[3] == "abort" and reasons.count("length") == 7


def test_a_replica_that_breaks_takes_only_its_own_requests_with_it():
    gates = [Gate(), Gate()]
    engines = [FakeEngine(on_step=gate) for gate in gates]
    face = replicas(*engines)

    async def breakdown():
        tasks = [asyncio.ensure_future(final(face, str(i) * 12)) for i in range(6)]
        while face.num_live_requests < 6:
            await asyncio.sleep(0)
        gates[0].error = RuntimeError("the device is gone")
        for gate in gates:
            gate.opened.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert face.is_alive and face.num_alive == 1
        # What the dead one knew is of no use any more.
        again = [(await final(face, str(i) * 12)).finished for i in range(6)]
        return results, again

    try:
        results, again = run(breakdown())
        failed = [r for r in results if isinstance(r, BaseException)]
        assert len(failed) == 3 and all(isinstance(r, ReplicaDeadError) for r in failed)
        assert "replica 0 of 2 broke" in str(failed[0])
        assert all(again)
        gates[1].error = RuntimeError("this one too")
        with pytest.raises(EngineDeadError) as caught:
            run(final(face, "hello"))
        assert type(caught.value) is EngineDeadError  # nobody is left to be asked
        assert not face.is_alive
        with pytest.raises(EngineDeadError):
            run(final(face, "hello"))
    finally:
        face.shutdown()


def test_unseeded_requests_repeat_whoever_runs_them():
    def texts(num_replicas: int) -> list[str]:
        face = replicas(*(FakeEngine() for _ in range(num_replicas)), seed=7)

        async def all_texts():
            params = SamplingParams(max_tokens=8, temperature=1.0)
            return [(await final(face, f"{i} hello", params)).outputs[0].text for i in range(5)]

        try:
            return run(all_texts())
        finally:
            face.shutdown()

    assert texts(1) == texts(2) == texts(3)


@pytest.mark.parametrize(
    "prompt", ["", [], [1, "a"], [-1], [10**30], {"prompt": 3}, {"nonsense": 1}, 5, "x" * 5000]
)
def test_bad_prompts_are_refused_as_by_one_engine(prompt):
    face, single = replicas(FakeEngine(), FakeEngine()), replicas(FakeEngine())
    messages = []
    try:
        for one in (face, single.engines[0]):
            with pytest.raises(InvalidRequestError) as caught:
                run(final(one, prompt))
            messages.append((str(caught.value), caught.value.param))
    finally:
        face.shutdown()
        single.shutdown()
    assert messages[0] == messages[1]


def test_after_shutdown_nothing_is_served():
    face = replicas(FakeEngine(), FakeEngine())
    face.shutdown()
    face.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        run(final(face, "hello"))


def test_no_model_at_all_is_an_error():
    with pytest.raises(ConfigError, match="at least one"):
        Replicas([])


def test_sums_of_counters():
    one = EngineStats(num_steps=3, kv_cache_usage=0.5, finished={"stop": 1, "length": 2})
    two = EngineStats(num_steps=4, kv_cache_usage=0.25, finished={"stop": 5})
    one.count_step(5, 8, 1, 1)
    total = summed([one, two])
    assert (total.num_steps, total.kv_cache_usage) == (7, 0.375)
    assert total.finished == {"stop": 6, "length": 2}
    assert sum(total.tokens_per_step) == 1 and total.num_padding_tokens == 3
