"""A prompt's vector is the pooled hidden states, however the prompt was cut, mixed or preempted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.engine import Engine
from jaxinfer.request import FinishReason, Pooling
from jaxinfer.sampling_params import SamplingParams
from tests.engines import hidden_of, make_engine
from tests.server.fakes import ByteTokenizer

NAME = "llama2"
SETTINGS = {"max_num_batched_tokens": 16}
LENGTHS = (1, 2, 16, 17, 40, 100)
# float32 sums of at most a hundred states, added up in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ONE = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 60, n).tolist() for n in LENGTHS]


def expected(engine: Engine, prompt: list[int], pooling: Pooling) -> np.ndarray:
    hidden = hidden_of(engine, np.asarray(prompt), 8).astype(np.float64)
    return hidden.mean(axis=0) if pooling is Pooling.MEAN else hidden[-1]


def run(engine: Engine) -> dict:
    outputs = {}
    while engine.has_unfinished():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    engine.check_integrity()
    return outputs


@pytest.mark.parametrize("overlap", [True, False])
def test_vectors_of_a_mixed_batch_are_the_pooled_hidden_states(overlap):
    engine = make_engine(NAME, overlap=overlap, **SETTINGS)
    wanted = {}
    for i, prompt in enumerate(prompts()):
        for pooling in Pooling:
            name = f"{pooling}-{i}"
            engine.add_request(name, prompt, ONE, pooling=pooling)
            wanted[name] = expected(engine, prompt, pooling)
    engine.add_request("text", prompts()[3], SamplingParams(max_tokens=20, ignore_eos=True))
    outputs = run(engine)
    for name, vector in wanted.items():
        output = outputs[name]
        assert (output.finish_reason, output.new_token_ids) == (FinishReason.STOP, ())
        assert output.pooled.dtype == np.float32
        np.testing.assert_allclose(output.pooled, vector, **CLOSE)
    assert outputs["text"].pooled is None
    assert engine.stats.generation_tokens == 20


def test_preempted_prompts_are_pooled_from_their_start():
    engine = make_engine(NAME, num_pages=44, enable_prefix_caching=False, max_num_batched_tokens=8)
    long = prompts()[-1]
    # They grow until there is no page left for the late comer, who gives way half computed.
    for i in range(2):
        engine.add_request(f"text-{i}", long, SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(32):
        engine.step()
    engine.add_request("mean", long, ONE, pooling=Pooling.MEAN)
    while not engine.stats.num_preemptions:
        computed = engine.num_computed_tokens("mean")
        engine.step()
    assert 8 < computed < len(long)
    vector = run(engine)["mean"].pooled
    np.testing.assert_allclose(vector, expected(engine, long, Pooling.MEAN), **CLOSE)


def test_a_cached_prefix_shortens_the_work_of_last_and_not_that_of_mean():
    engine = make_engine(NAME, **SETTINGS)
    prompt = prompts()[-1]
    for name, pooling in (("a", "last"), ("b", "last"), ("c", "mean")):
        engine.add_request(name, prompt, ONE, pooling=Pooling(pooling))
        output = run(engine)[name]
        assert output.num_cached_tokens == (96 if name == "b" else 0)
        np.testing.assert_allclose(
            output.pooled, expected(engine, prompt, Pooling(pooling)), **CLOSE
        )


def test_warm_up_leaves_nothing_to_compile():
    engine = make_engine(NAME, buckets=(16,), **SETTINGS)
    engine.runner.warmup()
    engine.warmed_up()
    engine.add_request("mean", prompts()[-1], ONE, pooling=Pooling.MEAN)
    run(engine)
    assert engine.stats.compilations_after_warmup == 0


@pytest.mark.timeout(60)
def test_async_callers_get_vectors_side_by_side():
    engine = make_engine(NAME, **SETTINGS)
    wanted = [expected(engine, prompt, Pooling.MEAN) for prompt in prompts()]
    loaded = SimpleNamespace(
        engine=engine,
        tokenizer=ByteTokenizer(),
        config=engine.config,
        name=NAME,
        generation_config={},
    )

    async def embed_all(asynchronous: AsyncEngine) -> list[np.ndarray]:
        calls = (asynchronous.embed(prompt, Pooling.MEAN) for prompt in prompts())
        return [output.embedding for output in await asyncio.gather(*calls)]

    asynchronous = AsyncEngine(loaded)
    try:
        for got, want in zip(asyncio.run(embed_all(asynchronous)), wanted, strict=True):
            np.testing.assert_allclose(got, want, **CLOSE)
    finally:
        asynchronous.shutdown()
