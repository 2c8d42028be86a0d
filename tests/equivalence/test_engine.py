"""Two ways to the same tokens: alone or batched, whole or chunked, cold or cached, plain or not."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from flax import nnx

from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequestError
from jaxinfer.model_runner import ModelRunner
from jaxinfer.models import Transformer
from jaxinfer.request import FinishReason
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sharding import make_mesh
from tests.engines import (
    Work,
    loaded,
    logits_of,
    make_engine,
    run,
    run_alone,
    run_tokens,
    tokens_of,
)


def mixed_work(count: int, vocab_size: int = 320, longest: int = 120, seed: int = 0):
    """Return requests of every kind: lengths, greedy and seeded, penalties, masks, logprobs."""
    rng = np.random.default_rng(seed)
    kinds = itertools.cycle(
        [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
            {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
            {"temperature": 0.0, "logprobs": 3},
            {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.8},
            {"temperature": 0.0, "logit_bias": {7: 3.0, 11: -5.0}, "min_tokens": 1},
            {"temperature": 0.9, "allowed_token_ids": list(range(3, 90))},
        ]
    )
    work = {}
    for i in range(count):
        length = int(rng.integers(3, longest))
        params = SamplingParams(max_tokens=int(rng.integers(1, 40)), **next(kinds))
        prompt = tuple(int(t) for t in rng.integers(3, vocab_size, length))
        work[f"r{i}"] = Work(prompt, params, seed=1000 + i)
    return work


# Chunks and whole prompts; with these programs only, engines of all settings share a runner. That
# each bucket is chosen and right is seen with `smollm2`, which has them all.
FEW = (8, 64)


@functools.cache
def alone_tokens(
    model: str, buckets: tuple[int, ...] = ()
) -> tuple[dict[str, Work], dict[str, list[int]]]:
    """Return 24 requests, and the tokens of each one alone on a plain, uncached engine."""
    work = mixed_work(24)
    engine = make_engine(model, buckets, overlap=False, enable_prefix_caching=False)
    return work, run_alone(engine, work)


@pytest.fixture
def reference():
    """Return a model for the whole matrix of settings, its requests and their tokens."""
    return "smollm2", *alone_tokens("smollm2")


@pytest.mark.parametrize("model", ["mistral", "gemma3", "llama3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False},
        {"max_num_batched_tokens": 8},
        {"num_pages": 36},
    ],
    ids=["batched", "plain", "chunked", "preempted"],
)
def test_windows_and_scaled_positions_keep_their_tokens_too(model: str, settings) -> None:
    work, alone = alone_tokens(model, FEW)
    engine = make_engine(model, FEW, **settings)
    assert run_tokens(engine, work) == alone
    few_pages, hits = "num_pages" in settings, engine.stats.prefix_cache_hits
    # Gemma 3's sequences end too soon to crowd each other out; its goldens see to that.
    assert model == "gemma3" or (engine.stats.num_preemptions > 0) == few_pages
    assert run_tokens(engine, work) == alone  # most of it from the prefix cache
    assert few_pages or engine.stats.prefix_cache_hits > hits
    assert engine.stats.num_pages_used == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_batched_requests_get_the_tokens_they_get_alone(reference, overlap, caching) -> None:
    model, work, alone = reference
    engine = make_engine(model, overlap=overlap, enable_prefix_caching=caching)
    assert run_tokens(engine, work) == alone


@pytest.mark.parametrize("chunk", [8, 32], ids="chunks of {}".format)
def test_chunked_prompts_give_the_same_tokens(reference, chunk) -> None:
    model, work, alone = reference
    engine = make_engine(model, max_num_batched_tokens=chunk)
    assert run_tokens(engine, work) == alone


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_preempted_requests_resume_with_the_same_tokens(reference, overlap, caching) -> None:
    model, work, alone = reference
    settings = {"overlap": overlap, "enable_prefix_caching": caching}
    engine = make_engine(model, FEW, num_pages=36, **settings)
    assert run_tokens(engine, work) == alone
    assert engine.stats.num_preemptions > 0


def test_cached_prefixes_give_the_same_tokens(reference) -> None:
    model, work, alone = reference
    engine = make_engine(model)
    assert run_tokens(engine, work) == alone
    cold = engine.stats.prefix_cache_hits
    assert run_tokens(engine, work) == alone
    assert engine.stats.prefix_cache_hits > cold


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_size_does_not_matter(page_size: int) -> None:
    work = mixed_work(10, seed=5)
    expected = run_alone(make_engine("mistral", FEW), work)
    engine = make_engine("mistral", FEW, page_size=page_size, num_pages=2048 // page_size)
    assert run_tokens(engine, work) == expected


def test_requests_of_equal_prompts_share_pages_within_one_step() -> None:
    prompt = tuple(range(10, 90))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    work = {f"r{i}": Work(prompt, params) for i in range(6)}
    engine = make_engine("smollm2")
    tokens = run_tokens(engine, work)
    assert len({tuple(t) for t in tokens.values()}) == 1
    assert engine.stats.prefix_cache_hits > 0


def test_salts_keep_prefixes_apart() -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine = make_engine("smollm2")
    prompt = tuple(range(10, 90))
    run(engine, {"a": Work(prompt, params, cache_salt="alice")})
    run(engine, {"b": Work(prompt, params, cache_salt="bob")})
    assert engine.stats.prefix_cache_hits == 0
    run(engine, {"c": Work(prompt, params, cache_salt="alice")})
    assert engine.stats.prefix_cache_hits == 72  # nine full pages of the 80 tokens


def test_a_seed_gives_the_same_tokens_in_any_company_and_other_seeds_give_others() -> None:
    params = SamplingParams(temperature=1, max_tokens=24, ignore_eos=True)
    prompt = tuple(range(5, 25))
    work = {f"s{seed}": Work(prompt, params, seed=seed) for seed in range(8)}
    engine = make_engine("smollm2")
    together = run_tokens(engine, work)
    assert together == run_alone(engine, work)
    assert len({tuple(t) for t in together.values()}) == 8


def test_logprobs_are_those_of_the_token_and_of_the_likeliest() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=4, ignore_eos=True)
    outputs = run(make_engine("smollm2"), {"a": Work(tuple(range(5, 25)), params)})["a"]
    entries = [entry for output in outputs for entry in output.logprobs]
    assert len(entries) == 8
    for token, entry in zip(tokens_of(outputs), entries, strict=True):
        assert entry.rank == 1
        assert entry.top_token_ids[0] == token
        assert entry.top_logprobs[0] == pytest.approx(entry.logprob, abs=1e-6)
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)


@pytest.mark.parametrize("chunk", [8, 64])
def test_prompt_logprobs_are_the_same_in_chunks_and_from_the_logits(chunk: int) -> None:
    prompt = np.arange(5, 75, dtype=np.int32)
    engine = make_engine("smollm2", max_num_batched_tokens=chunk)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    outputs = run(engine, {"a": Work(tuple(prompt.tolist()), params)})["a"]
    entries = outputs[0].prompt_logprobs
    assert len(entries) == len(prompt) and entries[0] is None
    logits = logits_of(engine, prompt, chunk).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for position, entry in enumerate(entries[1:], start=1):
        expected = logprobs[position - 1]
        assert entry.logprob == pytest.approx(expected[prompt[position]], abs=1e-4)
        assert entry.top_token_ids[0] == expected.argmax()


def test_nothing_compiles_after_warmup() -> None:
    engine = make_engine("smollm2", max_num_seqs=4, max_num_batched_tokens=16, num_pages=64)
    engine.runner.warmup()
    engine.warmed_up()
    work = mixed_work(12, longest=60, seed=3)
    work["scored"] = Work(tuple(range(5, 40)), SamplingParams(prompt_logprobs=3, max_tokens=2))
    run(engine, work)
    assert engine.stats.compilations_after_warmup == 0
    engine.close()


def test_tokens_do_not_depend_on_which_programs_are_ready() -> None:
    work = mixed_work(6, longest=14, seed=4)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 64}
    engine = make_engine("smollm2", **settings, num_decode_steps=2)
    programs = engine.runner.programs
    for key in programs.first:
        _ = programs.compiled[key]
    # As if threads were at it and came no further.
    programs.compiled._num_threads = 1
    assert run_tokens(engine, work) == run_alone(make_engine("smollm2", **settings), work)
    assert len(programs.compiled) == len(programs.first)


def test_min_tokens_bans_no_end_token_that_is_ignored_anyway() -> None:
    prompt = tuple(range(5, 25))
    # Token 2 ends a sequence here; make it likely.
    common = {"temperature": 0, "max_tokens": 8, "logit_bias": {2: 30.0}, "ignore_eos": True}
    work = {
        "plain": Work(prompt, SamplingParams(**common)),
        "min": Work(prompt, SamplingParams(**common, min_tokens=8)),
    }
    tokens = run_tokens(make_engine("smollm2"), work)
    assert tokens["min"] == tokens["plain"]
    assert 2 in tokens["plain"]


def test_an_unforeseen_compilation_is_counted() -> None:
    engine = make_engine("llama2", max_num_seqs=3, max_num_batched_tokens=9)
    engine.warmed_up()  # a lie: nothing was compiled
    run(engine, {"a": Work((5, 6, 7), SamplingParams(max_tokens=2))})
    assert engine.stats.compilations_after_warmup > 0


def test_nan_logits_end_their_request_only_and_leave_no_trace() -> None:
    """A NaN in one token's embedding: who uses it fails, whoever gets the pages later does not."""
    engine = make_engine("smollm2", num_pages=40)
    ok = Work(tuple(range(5, 60)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    alone = run_tokens(engine, {"ok": ok})["ok"]
    poisoned = _with_nan_embedding(engine, token_id=300)
    bad = Work((7, 8, 300, 9) * 10, SamplingParams(max_tokens=12))
    outputs = run(poisoned, {"bad": bad, "ok": ok, "bad2": bad})
    assert tokens_of(outputs["ok"]) == alone
    for name in ("bad", "bad2"):
        assert outputs[name][-1].finish_reason is FinishReason.ERROR
        assert "NaN" in outputs[name][-1].error
    assert poisoned.stats.num_corrupted_requests == 2
    # Every page is reused here, those full of NaN among them.
    others = {f"o{i}": Work(tuple(range(6 + i, 61 + i)), ok.params) for i in range(6)}
    assert run_tokens(poisoned, others) == run_alone(engine, others)


def _with_nan_embedding(engine: Engine, token_id: int) -> Engine:
    """Return an engine whose head is untied, or the NaN would reach everybody's logits."""
    _, config, _, parameters = loaded("smollm2")
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    model = nnx.eval_shape(lambda: Transformer(untied, np.float32))
    table = parameters["embed.embedding"]
    parameters = {
        **parameters,
        "lm_head.kernel": table.T,
        "embed.embedding": table.at[token_id].set(np.nan),
    }
    runner = ModelRunner(untied, model, parameters, make_mesh(), engine.runner.config)
    return Engine(engine.config, runner, vocab_size=config.vocab_size, eos_token_ids=frozenset({2}))


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ((), {}, "prompt"),
        ((5, -1), {}, "prompt"),
        ((5, 320), {}, "prompt"),
        (tuple([5] * 256), {}, "prompt"),
        ((5,), {"logprobs": 21}, "logprobs"),
        ((5,), {"prompt_logprobs": 21}, "prompt_logprobs"),
        ((5,), {"stop_token_ids": [320]}, "stop_token_ids"),
        ((5,), {"logit_bias": {320: 1.0}}, "logit_bias"),
        ((5,), {"n": 2}, "n"),
    ],
)
def test_bad_requests_are_refused_by_field_and_hurt_nobody(prompt, params, param) -> None:
    engine = make_engine("smollm2")
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert error.value.param == param
    good = Work((5, 6, 7), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(run_tokens(engine, {"good": good})["good"]) == 4


def test_aborted_requests_leave_no_page_behind_and_others_alone(reference) -> None:
    model, work, alone = reference
    engine = make_engine(model)
    for name, w in work.items():
        engine.add_request(name, w.prompt, w.params, seed=w.seed)
    victims = list(work)[::3]
    tokens = {name: [] for name in work}
    for step in itertools.count():
        if not engine.has_unfinished():
            break
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
        if step % 2 == 0 and victims:
            engine.abort(victims.pop())
        engine.check_integrity()
    survivors = set(work) - set(list(work)[::3])
    assert {name: tokens[name] for name in survivors} == {name: alone[name] for name in survivors}
    assert engine.stats.num_pages_used == 0
