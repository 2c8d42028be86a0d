"""Streams over a fake engine: aborts at every stage, death, slow readers, several event loops."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from contextlib import aclosing, contextmanager

import pytest

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxinfer.sampling_params import SamplingParams
from tests.unit.faces.fakes import FakeEngine, loaded

TIMEOUT_S = 20.0
SHORT = SamplingParams(max_tokens=5, seed=1)
LONG = SamplingParams(max_tokens=900, seed=1)


@contextmanager
def serving(fake=None, *, observer=None, **settings):
    """Yield an `AsyncEngine` around `fake`; afterwards nothing may be left of any request."""
    fake = fake or FakeEngine()
    engine = AsyncEngine(loaded(fake, **settings), observer=observer)
    try:
        yield engine
    finally:
        engine.shutdown(drain_timeout_s=TIMEOUT_S)
    assert not engine._thread.is_alive()
    assert not fake.live and engine.num_live_requests == 0 and fake.closed
    assert fake.threads <= {"jaxinfer-engine"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


async def collect(stream):
    return [output async for output in stream]


async def whole(engine, prompt="hi", params=SHORT, **kwargs):
    (output,) = await collect(engine.generate(prompt, params, final_only=True, **kwargs))
    return output.outputs[0]


async def until(engine, condition):
    """Wait until `condition()` holds between two steps; the engine thread is asked, not polled."""
    loop = asyncio.get_running_loop()
    while True:
        reached = loop.create_future()
        engine._thread.post(lambda: loop.call_soon_threadsafe(reached.set_result, condition()))  # noqa: B023
        if await reached:
            return


class Gate:
    """Lets the engine do steps only as allowed."""

    def __init__(self, allowed=0):
        self._steps = threading.Semaphore(allowed)
        self._open = False
        self._reached = threading.Semaphore(0)

    def __call__(self, number):
        self._reached.release()
        if not self._open:
            assert self._steps.acquire(timeout=TIMEOUT_S), "no step was allowed in time"

    async def next_step(self):
        """Wait until the engine thread stands before a step not waited for yet."""
        assert await asyncio.to_thread(self._reached.acquire, timeout=TIMEOUT_S)

    def allow(self, number=1):
        self._steps.release(number)

    def open(self):
        self._open = True
        self._steps.release()


def test_streamed_text_equals_the_whole():
    async def main():
        params = SamplingParams(max_tokens=200, stop="zz", seed=4, n=2, logprobs=1)
        (final,) = await collect(engine.generate("hi", params, final_only=True))
        cumulative = await collect(engine.generate("hi", params))
        deltas = await collect(engine.generate("hi", params, delta=True))
        assert cumulative[-1].outputs == final.outputs
        for sample in final.outputs:
            parts = [s for d in deltas for s in d.outputs if s.index == sample.index]
            assert "".join(p.text for p in parts) == sample.text
            assert [i for p in parts for i in p.token_ids] == sample.token_ids
        assert deltas[-1].finished and final.finished

    with serving() as engine:
        run(main())


def test_many_at_once_get_the_tokens_they_get_alone():
    async def main():
        params = [SamplingParams(seed=i, max_tokens=1 + i % 9) for i in range(60)]
        together = await asyncio.gather(*(whole(engine, f"p{i}", p) for i, p in enumerate(params)))
        alone = [await whole(engine, f"p{i}", p) for i, p in enumerate(params)]
        assert together == alone

    with serving(FakeEngine(max_num_seqs=7)) as engine:
        run(main())


BAD = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "x" * 1000}, "prompt"),
    ({"prompt": "x" * 100_000}, "prompt"),
    ({"prompt": "too long for the pages"}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"params": {"n": 1}}, "sampling_params"),
    ({"params": SamplingParams(max_tokens=1000)}, "max_tokens"),
    ({"params": SamplingParams(logprobs=21)}, "logprobs"),
    ({"params": SamplingParams(n=3, logit_bias={10**6: 1.0})}, "logit_bias"),
    ({"request_id": ""}, "request_id"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"priority": 1.5}, "priority"),
]


@pytest.mark.parametrize("bad, param", BAD, ids=lambda x: repr(x)[:40])
def test_a_bad_request_is_refused_by_name_and_the_next_one_works(bad, param):
    async def main():
        with pytest.raises(InvalidRequestError) as caught:
            await anext(engine.generate(**{"prompt": "hi", "params": SHORT, **bad}))
        assert caught.value.param == param
        assert (await whole(engine)).finish_reason == "length"

    with serving(FakeEngine(num_pages=10)) as engine:
        run(main())


def test_a_full_queue_refuses_all_samples_of_a_request():
    async def main():
        with pytest.raises(QueueFullError):
            await whole(engine, params=SamplingParams(n=3))
        await until(engine, lambda: not fake.live)
        assert (await whole(engine)).text

    fake = FakeEngine(max_waiting=2)
    with serving(fake) as engine:
        run(main())
        assert fake.aborted


def test_a_name_in_use_is_refused_and_free_again_after_the_end():
    async def main():
        stream = engine.generate("hi", LONG, "name")
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="in use") as caught:
            await anext(engine.generate("hi", SHORT, "name"))
        assert caught.value.param == "request_id"
        await stream.aclose()
        gate.open()
        await until(engine, lambda: not fake.live)
        for _ in range(20):
            await whole(engine, request_id="name")

    gate = Gate(1)
    fake = FakeEngine(on_step=gate)
    with serving(fake) as engine:
        run(main())


@pytest.mark.parametrize("num_steps", [0, 1, 7])
@pytest.mark.parametrize("how", ["abort", "aclose", "cancel", "error"])
def test_an_abort_frees_the_request_before_the_next_step(how, num_steps):
    gate = Gate(num_steps)
    fake = FakeEngine(on_step=gate)

    async def consume(stream, seen, in_flight):
        async with aclosing(stream):
            async for output in stream:
                seen.append(output)
                if how == "error" and len(output.outputs[0].token_ids) == num_steps:
                    await in_flight.wait()
                    raise RuntimeError("in the loop's body")

    async def main():
        seen, in_flight = [], asyncio.Event()
        stream = engine.generate("hi", LONG, "mine")
        task = asyncio.create_task(consume(stream, seen, in_flight))
        for _ in range(num_steps + 1):
            await gate.next_step()
        in_flight.set()  # the engine thread now waits in the next step
        while num_steps and not (seen and len(seen[-1].outputs[0].token_ids) == num_steps):
            await asyncio.sleep(0)
        if how == "abort":
            engine.abort("mine")
            gate.allow()
            await task
            assert seen[-1].outputs[0].finish_reason == "abort" and seen[-1].finished
            assert len(seen[-1].outputs[0].token_ids) == num_steps + 1
        else:
            if how != "error" or not num_steps:
                task.cancel()
            with pytest.raises((asyncio.CancelledError, RuntimeError)):
                await task
            gate.allow()
        # The step that was in flight is the last one with this request.
        await until(engine, lambda: not fake.live)
        assert fake.stats.num_steps == num_steps + 1
        assert [name for name, _ in fake.aborted] == ["mine-0"]
        gate.open()
        assert (await whole(engine)).finish_reason == "length"

    with serving(fake) as engine:
        run(main())


def test_aborting_what_ended_or_never_was_is_no_error():
    async def main():
        await whole(engine, request_id="done")
        engine.abort("done")
        engine.abort("never")
        assert (await whole(engine)).text

    with serving() as engine:
        run(main())


def test_many_words_to_rule_out_are_encoded_beside_the_event_loop():
    threads = set()

    async def main():
        for num_words in (1, 100):
            threads.clear()
            words = [f"w{i}" for i in range(num_words)]
            await whole(engine, params=SamplingParams(max_tokens=1, bad_words=words))
            assert all("encode" in name for name in threads) == (num_words > 1), threads

    with serving() as engine:
        encode = engine.tokenizer.encode_bad_word

        def noting(word):
            threads.add(threading.current_thread().name)
            return encode(word)

        engine.tokenizer.encode_bad_word = noting
        run(main())


def test_a_forgotten_stream_is_aborted():
    async def main():
        async for _ in engine.generate("hi", LONG, "forgotten"):
            break
        gc.collect()
        while not engine._thread._commands:  # the event loop closes the stream in its next rounds
            await asyncio.sleep(0)
        gate.open()
        await until(engine, lambda: not fake.live)

    gate = Gate(1)
    fake = FakeEngine(on_step=gate)
    with serving(fake) as engine:
        run(main())
    assert fake.aborted


def test_a_hundred_cancelled_streams_leave_nothing():
    async def main():
        async def one(i):
            stream = engine.generate(f"p{i}", SamplingParams(max_tokens=900, n=1 + i % 3))
            async with aclosing(stream):
                async for output in stream:
                    if len(output.outputs[0].token_ids) >= i % 7:
                        return

        tasks = [asyncio.create_task(one(i)) for i in range(100)]
        for task in tasks[::3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(engine, lambda: not fake.live)
        assert engine.num_live_requests == 0 and engine._thread._outputs.num_requests == 0
        assert not engine._thread._outputs._samples
        assert (await whole(engine)).text

    fake = FakeEngine()
    with serving(fake) as engine:
        run(main())


def test_a_slow_reader_gets_larger_pieces_and_no_queue_grows():
    async def main():
        stream = engine.generate("hi", LONG, delta=True)
        pieces = [await anext(stream)]
        gate.open()
        await until(engine, lambda: not fake.live)  # all is done before the second read
        pieces += await collect(stream)
        assert len(pieces) == 2
        assert sum(len(p.outputs[0].token_ids) for p in pieces) == 900
        assert "".join(p.outputs[0].text for p in pieces) == (await whole(engine, params=LONG)).text

    gate = Gate(1)
    fake = FakeEngine(on_step=gate)
    with serving(fake) as engine:
        run(main())


def test_two_event_loops_share_the_engine():
    results = {}

    def client(name):
        async def main():
            params = [SamplingParams(seed=i, max_tokens=20) for i in range(20)]
            return await asyncio.gather(*(whole(engine, params=p) for p in params))

        results[name] = run(main())

    with serving() as engine:
        threads = [threading.Thread(target=client, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert results["a"] == results["b"]


def test_a_reader_whose_event_loop_is_gone_is_aborted():
    gate = Gate(1)
    fake = FakeEngine(on_step=gate)
    with serving(fake) as engine:
        loop = asyncio.new_event_loop()
        stream = engine.generate("hi", LONG)
        loop.run_until_complete(asyncio.wait_for(anext(stream), TIMEOUT_S))
        loop.close()
        gate.open()
        run(until(engine, lambda: not fake.live))
        assert fake.aborted


def test_a_broken_step_ends_everyone_once_and_for_all(caplog):
    gate = Gate()

    def breaks(number):
        gate(number)
        if number == 2:
            raise ZeroDivisionError("page of nobody")

    async def main():
        streams = [asyncio.create_task(collect(engine.generate("hi", LONG))) for _ in range(5)]
        gate.open()
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert [type(r) for r in results] == [EngineDeadError] * 5
        assert all(isinstance(r.__cause__, ZeroDivisionError) for r in results)
        assert not engine.is_alive
        with pytest.raises(EngineDeadError, match="page of nobody"):
            await whole(engine)
        with pytest.raises(EngineDeadError, match="page of nobody"):
            await engine.chat_prompt([])

    fake = FakeEngine(on_step=breaks)
    engine = AsyncEngine(loaded(fake))
    with caplog.at_level(logging.CRITICAL):
        run(main())
    engine.shutdown(TIMEOUT_S)
    (record,) = [r for r in caplog.records if r.levelno == logging.CRITICAL]
    assert record.exc_info[0] is ZeroDivisionError
    assert engine.stalled_s == 0.0


def test_a_broken_invariant_found_when_idle_stops_the_engine(caplog):
    async def main():
        await whole(engine)
        while not fake.num_checks:  # the check behind the first request must not see it broken
            await asyncio.sleep(0)
        fake.corrupt = True
        await whole(engine)
        await asyncio.to_thread(engine._thread.join, TIMEOUT_S)
        with pytest.raises(EngineDeadError, match="two owners"):
            await whole(engine)

    fake = FakeEngine()
    engine = AsyncEngine(loaded(fake))
    run(main())
    assert fake.num_checks >= 2 and not engine.is_alive
    engine.shutdown()


def test_an_error_of_one_request_leaves_the_others_alone():
    async def main():
        broken = asyncio.create_task(whole(engine, params=LONG, request_id="broken"))
        await gate.next_step()
        fake.fail_next.add("broken-0")
        gate.open()
        good, bad = await asyncio.gather(whole(engine), broken)
        assert (bad.finish_reason, bad.error) == ("error", "logits held a NaN")
        assert good.finish_reason == "length" and engine.is_alive

    gate = Gate()
    fake = FakeEngine(on_step=gate)
    with serving(fake) as engine:
        run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_drains_or_aborts_and_refuses_what_comes_later(drain):
    async def main():
        running = asyncio.create_task(whole(engine, params=LONG))
        await gate.next_step()
        ending = asyncio.create_task(
            asyncio.to_thread(engine.shutdown, TIMEOUT_S if drain else 0.0)
        )
        while engine.is_alive:
            await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shut down"):
            await whole(engine)
        if not drain:
            while not engine._thread._commands:  # the abort is posted while the step is in flight
                await asyncio.sleep(0)
        gate.open()
        output = await running
        await ending
        assert (output.finish_reason, len(output.token_ids)) == (
            ("length", 900) if drain else ("abort", 1)
        )

    gate = Gate()
    fake = FakeEngine(on_step=gate)
    engine = AsyncEngine(loaded(fake))
    run(main())
    assert not engine._thread.is_alive() and not fake.live
    engine.shutdown()


def test_long_texts_are_encoded_off_the_event_loop():
    async def main():
        await whole(engine, "short")
        assert engine.tokenizer.encoding_threads == {threading.current_thread().name}
        engine.tokenizer.encoding_threads.clear()
        await whole(engine, "x" * 20_000)
        await whole(engine, {"prompt": "x" * 20_000})
        await engine.encode("x" * 20_000)
        await engine.chat_prompt([{"role": "user", "content": "short"}])
        assert all(t.startswith("jaxinfer-encode") for t in engine.tokenizer.encoding_threads)

    with serving(FakeEngine(max_model_len=50_000, num_pages=50_000)) as engine:
        run(main())


def test_chat_renders_and_streams():
    async def main():
        talk = [{"role": "user", "content": "hi"}]
        outputs = await collect(engine.chat(talk, SHORT, chat_template_kwargs={"lang": "fr"}))
        assert outputs[-1].prompt == "user: hi\nlang=fr\nassistant: "
        assert outputs[-1].outputs[0].text == "hello"
        async with aclosing(engine.chat(talk, LONG, "closed", delta=True)) as stream:
            assert (await anext(stream)).outputs[0].text
        with pytest.raises(InvalidRequestError):
            await anext(engine.chat([{"role": "nobody", "content": ""}], SHORT))

    with serving(FakeEngine(script="hello")) as engine:
        run(main())


def test_the_models_defaults_apply_and_unseeded_requests_repeat_under_a_seed():
    async def main(engine):
        return [(await whole(engine, params=None)).text for _ in range(3)]

    texts = []
    for _ in range(2):
        with serving(seed=3) as engine:
            texts.append(run(main(engine)))
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


def test_an_idle_engine_sleeps_and_is_not_stalled():
    async def main():
        await whole(engine)
        await until(engine, lambda: True)

    fake = FakeEngine()
    with serving(fake) as engine:
        run(main())
        steps = fake.stats.num_steps
        assert engine.is_alive
    assert engine.stalled_s == 0.0
    assert fake.stats.num_steps == steps == 5
    assert fake.num_checks >= 1
