"""Clients that leave mid-stream take everything with them: pages, arrays, memory."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.generation import Generation
from jaxinfer.request import Request
from jaxinfer.sampling_params import SamplingParams
from tests.golden.models.real_prompts import LONG_TEXT
from tests.real.model import RealModel

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

STATUS = Path("/proc/self/status")
TIMEOUT_S = 600

ROUND = 10
WARM_ROUNDS, ROUNDS = 5, 10

# The allocator now and then keeps another 10 to 20 MB of a step's temporaries, when threads meet in
# a way they had not met before; between such jumps nothing grows at all (measured over 800
# streams). A leak would show in every round, so the median is what counts. 10 kB a stream is less
# than the arrays of any step: 37 kB for the hidden states of its rows, 3 MB for their logits.
MAX_MEDIAN_GROWTH_BYTES = ROUND * 10_000


def resident_bytes() -> int:
    """Return private memory, in RAM or swapped out: others can only move it between the two."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


def num_objects() -> dict[str, int]:
    """Return how much of a request's is alive in this process."""
    gc.collect()
    kinds = [type(x) for x in gc.get_objects()]
    return {
        "requests": kinds.count(Request),
        "generations": kinds.count(Generation),
        "arrays": len(jax.live_arrays()),
    }


async def leave(engine: AsyncEngine, number: int) -> None:
    """Read a stream for some tokens, or not at all, and close it."""
    text = LONG_TEXT[number % 7 * 40 :][: 20 + number % 5 * 30]
    params = SamplingParams(max_tokens=500, seed=number, ignore_eos=True, n=1 + number % 4 // 3)
    stream = engine.generate(text, params, f"stream-{number}", delta=True)
    async with aclosing(stream):
        num_tokens = 0
        async for output in stream:
            num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
            if num_tokens > number % 6:
                return


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine thread has dealt with every abort; it is asked, not polled."""
    loop = asyncio.get_running_loop()
    while True:
        answer = loop.create_future()
        engine._thread.post(
            lambda answer=answer: loop.call_soon_threadsafe(
                answer.set_result, engine._engine.has_unfinished()
            )
        )
        if not await answer:
            return


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc to measure memory")
def test_a_hundred_streams_closed_midway_leave_nothing(real: RealModel) -> None:
    sizes, objects = [], []

    async def main(engine: AsyncEngine) -> None:
        for number in range(0, (WARM_ROUNDS + ROUNDS) * ROUND, ROUND):
            await asyncio.gather(*(leave(engine, number + i) for i in range(ROUND)))
            await idle(engine)
            assert engine.stats.num_pages_used == 0
            assert engine.num_live_requests == 0
            objects.append(num_objects())
            sizes.append(resident_bytes())

    # Programs that are still compiled in the background would be seen as growth.
    real.runner.finish_warmup()
    # Tests before this one may have left some, in a fixture or in the record of a failure.
    before = num_objects()
    with real.engine() as inner:
        engine = AsyncEngine(real.loaded(inner))
        try:
            asyncio.run(asyncio.wait_for(main(engine), TIMEOUT_S))
            inner.check_integrity()
            stats = engine.stats
            assert stats.finished == {
                "abort": sum(1 + i % 4 // 3 for i in range(len(sizes) * ROUND))
            }
            assert stats.compilations_after_warmup == 0
        finally:
            engine.shutdown()
    assert objects[WARM_ROUNDS:] == [objects[WARM_ROUNDS]] * ROUNDS
    for kind in ("requests", "generations"):
        assert objects[-1][kind] <= before[kind], kind
    growth = np.diff(sizes[WARM_ROUNDS - 1 :])
    assert np.median(growth) <= MAX_MEDIAN_GROWTH_BYTES, growth.tolist()
