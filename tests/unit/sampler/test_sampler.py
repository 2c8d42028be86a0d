"""The device sampler against float64 numpy, and the promise that rows do not see each other."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxinfer.batch import SampledTokens
from jaxinfer.sampler import _keep_likeliest, sample, token_logprobs
from jaxinfer.sampling_params import SamplingParams
from tests.unit.sampler import oracle
from tests.unit.sampler.harness import (
    MAX_LOGPROBS,
    Row,
    inputs_of,
    paged_history,
    run,
    step,
    tokens,
)

V = 300  # a multiple of neither 32 nor 256

# Every parameter, alone and combined.
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_k_beyond_candidates": {"top_k": 200, "temperature": 5.0},
    "top_p": {"top_p": 0.8},
    "top_p_beyond_candidates": {"top_p": 0.95, "temperature": 20.0},
    "min_p": {"min_p": 0.1},
    "all_limits": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0},
    "repetition_below_one": {"repetition_penalty": 0.6, "top_k": 20},
    "presence": {"presence_penalty": 1.5, "temperature": 0.5},
    "frequency": {"frequency_penalty": 0.9, "temperature": 0.0},
    "negative_frequency": {"frequency_penalty": -0.7, "top_p": 0.7},
    "all_penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
        "temperature": 0.9,
    },
    "bias": {"logit_bias": {3: 6.0, 299: -100.0, 0: 2.5}},
    "allowed": {"allowed_token_ids": (0, 31, 32, 255, 256, 299), "temperature": 2.0},
    "bad_words": {"bad_words_token_ids": ((5,), (7, 8), (1, 9, 2)), "temperature": 0.0},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (0, 299), "temperature": 2.0},
    "logprobs": {"logprobs": 3},
    "greedy_logprobs": {"logprobs": 0, "temperature": 0.0},
    "everything": {
        "logit_bias": {4: 3.0},
        "allowed_token_ids": tuple(range(0, 300, 2)),
        "bad_words_token_ids": ((6,),),
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "temperature": 1.5,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "logprobs": 5,
    },
}


def make_row(seed: int, params: dict[str, Any], V: int = V, **kw: Any) -> Row:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=V) * 2).astype(np.float32)
    logits[::4] = np.round(logits[::4])  # ties
    logits[11] = -np.inf
    kw.setdefault("prompt", rng.integers(0, V, 1 + seed % 13).tolist())
    kw.setdefault("output", rng.integers(0, V, seed % 7).tolist())
    return Row(
        logits=logits, params=SamplingParams(max_tokens=None, **params), seed=seed * 77, **kw
    )


def all_rows() -> list[Row]:
    return [make_row(i + 1, params) for i, params in enumerate(PARAMS.values())]


def law(row: Row) -> np.ndarray:
    x = oracle.edited_logits(row.logits, row.params, row.prompt, row.output, row.ends)
    return oracle.distribution(x, row.params)


def assert_bitwise(a: SampledTokens, b: SampledTokens, i: int, j: int) -> None:
    """Row i of `a` equals row j of `b` in every field and bit."""
    for field in dataclasses.fields(SampledTokens):
        x, y = getattr(a, field.name)[i], getattr(b, field.name)[j]
        assert x.tobytes() == y.tobytes(), field.name


@pytest.mark.parametrize("name", PARAMS)
def test_draws_follow_the_law(name: str) -> None:
    """2048 draws over 60 tokens against the exact distribution."""
    n, V = 2048, 60
    params = {**PARAMS[name]}
    if "logit_bias" in params:
        params["logit_bias"] = {3: 4.0, 59: -100.0}
    if "allowed_token_ids" in params:
        params["allowed_token_ids"] = tuple(range(0, 60, 5))
    if "stop_token_ids" in params:
        params["stop_token_ids"] = (0, 59)
    base = make_row(3, params, V=V, output=[7, 1, 9], ends=[4])
    rows = [dataclasses.replace(base, seed=i) for i in range(n)]
    expected = law(base) * n
    counts = np.bincount(tokens(rows, n), minlength=V)
    assert not counts[expected == 0].any()
    # The chi-square approximation wants 5 expected draws a cell: pool the rare tokens.
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > 1e-4


@pytest.mark.parametrize("V", [1, 2, 33, 300, 5000])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_tokens_kept_are_the_oracles(V: int, scale: float) -> None:
    settings = [
        {"top_k": k, "top_p": p, "temperature": t}
        for k in (0, 2, 128, 129, 1000)
        for p in (1.0, 0.5, 0.999, 1e-6)
        for t in (0.3, 1.0, 7.0)
    ]
    rng = np.random.default_rng(V)
    rows = []
    for params in settings:
        logits = (rng.normal(size=V) * scale).astype(np.float32)
        logits[:: max(1, V // 9)] = logits[0]  # a tie that any limit may meet
        logits[1::7] = -np.inf
        rows.append(Row(logits=logits, params=SamplingParams(**params)))
    logits = jnp.asarray([row.logits for row in rows])
    inputs = inputs_of(rows, len(rows))
    divisor = jnp.where(inputs.sampled, inputs.temperature, 1)
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor[:, None])
    kept = np.asarray(jax.jit(partial(_keep_likeliest, shards=None))(logits, weights, inputs))
    for row, got, before in zip(rows, kept, np.asarray(weights), strict=True):
        p, x = row.params.top_p, row.logits.astype(np.float64)
        share = oracle.distribution(x, dataclasses.replace(row.params, top_p=1.0))
        possible = (share > 0) & (before > 0)
        lowest = before[got > 0].min()
        np.testing.assert_array_equal(got > 0, possible & ((p == 1) | (before >= lowest)))
        np.testing.assert_array_equal(got[got > 0], before[got > 0])
        if p < 1:
            # The smallest such set that reaches p, up to the rounding of float32 sums.
            assert share[got > 0].sum() >= p - 1e-5
            assert share[before > lowest].sum() <= p + 1e-5


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = np.zeros(V, np.float32)
    logits[[40, 41, 299]] = 2
    assert tokens([Row(logits=logits, params=SamplingParams(temperature=0))], 8) == [40]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"temperature": 1e-6}, {"top_k": 1, "seed": 4}])
def test_top1_and_tiny_temperature_are_greedy(params: dict[str, Any]) -> None:
    rows = [make_row(seed, params) for seed in range(8)]
    greedy = [dataclasses.replace(row, params=SamplingParams(temperature=0)) for row in rows]
    assert tokens(rows, 8) == tokens(greedy, 8) == [int(np.argmax(r.logits)) for r in rows]


def test_the_smallest_temperature_draws_the_maximum() -> None:
    rows = [make_row(seed, {"temperature": 1e-5}) for seed in range(1, 8)]
    for row, token in zip(rows, tokens(rows, 8), strict=True):
        assert row.logits[token] == row.logits.max()


def test_the_largest_temperature_still_excludes_impossible_tokens() -> None:
    rows = [make_row(1, {"temperature": 1e300}) for _ in range(256)]
    rows = [dataclasses.replace(row, seed=i) for i, row in enumerate(rows)]
    drawn = tokens(rows, 512)
    assert 11 not in drawn  # its logit is -inf
    assert len(set(drawn)) > 100


def test_flat_logits_change_with_position_and_repeat_with_it() -> None:
    flat = np.zeros(V, np.float32)
    rows = [
        Row(logits=flat, params=SamplingParams(), seed=5, output=[0] * length)
        for length in range(512)
    ]
    first = tokens(rows, 512)
    assert first == tokens(rows, 512)
    # One seed, 512 positions: the draws are as independent as those of 512 seeds.
    counts = np.histogram(first, bins=10, range=(0, V))[0]
    assert stats.chisquare(counts).pvalue > 1e-4
    repeats = np.mean(np.array(first[1:]) == np.array(first[:-1]))
    assert repeats < 0.03


def test_draws_are_the_threefry_numbers_of_seed_and_position() -> None:
    flat = np.zeros(256, np.float32)  # among equals, the smallest number arrives first
    seeds = [0, 1, 12345, 2**31 - 1, 2**32 - 1]
    rows = [Row(logits=flat, params=SamplingParams(), seed=s, output=[3, 4]) for s in seeds]
    for seed, token in zip(seeds, tokens(rows, 8), strict=True):
        key = jax.random.fold_in(jax.random.key(np.uint32(seed), impl="threefry2x32"), 3)
        assert token == int(jnp.argmin(jax.random.bits(key, (256,), jnp.uint32)))


def test_seeds_are_64_bits_and_negative_ones_wrap() -> None:
    flat = np.zeros(V, np.float32)

    def draws(seed: int) -> list[int]:
        rows = [
            Row(logits=flat, params=SamplingParams(), seed=seed, output=[0] * i) for i in range(8)
        ]
        return tokens(rows, 8)

    assert draws(7) != draws(7 + 2**32)
    assert draws(-1) == draws(2**64 - 1)
    assert draws(-(2**63)) == draws(2**63)


def test_mixed_rows_equal_the_same_rows_alone_bitwise() -> None:
    rows = all_rows()
    mixed = run(rows, 32)
    for i, row in enumerate(rows):
        assert_bitwise(mixed, run([row], 32), i, 0)


def test_a_row_draws_the_same_token_in_every_bucket() -> None:
    rows = all_rows()
    want = tokens(rows, 32)
    for bucket in (1, 8):
        got = [
            token
            for start in range(0, len(rows), bucket)
            for token in tokens(rows[start : start + bucket], bucket)
        ]
        assert got == want


@settings(max_examples=25)
@given(
    row=st.sampled_from(sorted(PARAMS)),
    neighbours=st.lists(st.sampled_from(sorted(PARAMS)), max_size=3),
    slot=st.integers(0, 3),
    seed=st.integers(0, 50),
    broken=st.booleans(),
)
def test_neighbours_never_matter(
    row: str, neighbours: list[str], slot: int, seed: int, broken: bool
) -> None:
    mine = make_row(seed, PARAMS[row])
    others = [make_row(seed + 1 + i, PARAMS[name]) for i, name in enumerate(neighbours)]
    if broken and others:
        others[0] = dataclasses.replace(others[0], logits=np.full(V, np.nan, np.float32))
    slot = min(slot, len(others))
    assert_bitwise(run([*others[:slot], mine, *others[slot:]], 8), run([mine], 8), slot, 0)


def test_each_row_has_its_own_temperature() -> None:
    logits = np.linspace(0, 8, V, dtype=np.float32)
    temperatures = [0.0, 0.1, 1.0, 100.0] * 128
    rows = [
        Row(logits=logits, params=SamplingParams(temperature=t), seed=i)
        for i, t in enumerate(temperatures)
    ]
    spread = np.array(tokens(rows, 512)).reshape(-1, 4).std(0)
    assert spread[0] == 0
    assert spread[0] < spread[1] < spread[2] < spread[3]


@pytest.mark.parametrize("name", ["repetition", "frequency", "presence", "all_penalties"])
@pytest.mark.parametrize("length", [0, 3, 254, 255, 256, 257, 700])
def test_penalties_read_all_of_a_long_history(name: str, length: int) -> None:
    """Histories around the loop's block of 256 positions, next to shorter and longer ones."""
    params = {**PARAMS[name], "temperature": 0.0}
    rng = np.random.default_rng(length)
    rows = [make_row(2, params, output=rng.integers(0, 40, length).tolist())]
    rows += [make_row(3, {}), make_row(4, params), make_row(5, params, prompt=[5] * 600)]
    assert tokens(rows, 8)[::2] == [int(law(row).argmax()) for row in rows][::2]


def test_penalties_of_shared_pages_count_for_each_sequence() -> None:
    rows = [make_row(1, PARAMS["repetition"], prompt=[8, 9, 3, 4], output=[]) for _ in range(3)]
    history = paged_history(rows[:1], 8)
    table = np.asarray(history.page_table).copy()
    table[1:3] = table[0]
    shared = dataclasses.replace(
        history,
        page_table=jnp.asarray(table),
        seq_lens=jnp.array([4] * 3 + [0] * 5, jnp.int32),
    )
    logits = jnp.asarray(np.stack([rows[0].logits] * 8))
    jitted = jax.jit(sample, static_argnames="max_logprobs")
    result = jitted(logits, inputs_of(rows, 8), shared, max_logprobs=0)
    assert result.token_ids[:3].tolist() == [int(law(rows[0]).argmax())] * 3
    assert result.top_logprobs.shape == (8, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", PARAMS)
def test_a_nan_or_overflow_is_flagged_and_stays_in_its_row(name: str, bad: float) -> None:
    good = make_row(1, PARAMS[name])
    logits = good.logits.copy()
    logits[13] = bad  # masked out under "allowed": corrupt all the same
    result = run([good, dataclasses.replace(good, logits=logits)], 8)
    assert result.corrupted.tolist() == [False, True]
    assert 0 <= result.token_ids[1] < V
    assert result.logprobs[1] == 0
    assert not result.top_logprobs[1].any()
    assert_bitwise(result, run([good], 8), 0, 0)


def test_a_row_with_nothing_to_choose_from_is_flagged() -> None:
    empty = make_row(1, {}, prompt=[1], output=[])
    rows = [
        dataclasses.replace(empty, logits=np.full(V, -np.inf, np.float32)),
        make_row(1, {"allowed_token_ids": (11,)}),  # its logit is -inf
        make_row(1, {"allowed_token_ids": (4,), "bad_words_token_ids": ((4,),)}),
        make_row(1, {"allowed_token_ids": (4,), "temperature": 0.0, "min_tokens": 9}, ends=[4]),
        make_row(1, {"allowed_token_ids": (4,)}),
    ]
    result = run(rows, 8)
    assert result.corrupted.tolist() == [True, True, True, True, False]
    assert result.token_ids[4] == 4


def test_one_possible_token_is_always_taken() -> None:
    logits = np.full(V, -np.inf, np.float32)
    logits[V - 1] = -1e30
    rows = [Row(logits=logits, params=SamplingParams(**p)) for p in PARAMS.values()]
    free = [i for i, p in enumerate(PARAMS.values()) if not set(p) & {"allowed_token_ids"}]
    free.remove(list(PARAMS).index("min_tokens"))  # which bans it
    result = run(rows, 32)
    assert {int(result.token_ids[i]) for i in free} == {V - 1}
    assert not result.corrupted[free].any()


def test_logprobs_are_of_the_raw_distribution() -> None:
    rows = [
        make_row(i, {**PARAMS[name], "logprobs": 4})
        for i, name in enumerate(["everything", "greedy", "all_penalties", "hot", "top_k"])
    ]
    result = run(rows, 8)
    for i, row in enumerate(rows):
        want, token = oracle.logprobs(row.logits), result.token_ids[i]
        order = np.argsort(-row.logits, kind="stable")[:MAX_LOGPROBS]
        np.testing.assert_allclose(result.logprobs[i], want[token], atol=2e-6)
        assert result.ranks[i] == 1 + (row.logits > row.logits[token]).sum()
        np.testing.assert_array_equal(result.top_token_ids[i], order)
        np.testing.assert_allclose(result.top_logprobs[i], want[order], atol=2e-6)


def test_rows_that_want_no_logprobs_get_zeros() -> None:
    result = run([make_row(1, {"logprobs": 2}), make_row(2, {})], 8)
    assert result.ranks.tolist()[1] == 0
    assert not result.top_logprobs[1].any()
    assert result.ranks[0] > 0


def test_token_logprobs_score_given_tokens() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(7, 4)) * 50).astype(np.float32)
    logits[3, 1] = -np.inf
    targets = np.array([0, 1, 2, 1, 3, 0, 1], np.int32)
    found = token_logprobs(jnp.asarray(logits), jnp.asarray(targets), 20)
    want = np.stack([oracle.logprobs(row) for row in logits])
    np.testing.assert_allclose(found.logprobs, want[np.arange(7), targets], atol=1e-4, rtol=1e-6)
    assert found.logprobs[3] == -np.inf
    assert found.ranks[3] == 4
    # A vocabulary smaller than `max_logprobs`: as wide as there are tokens.
    np.testing.assert_array_equal(found.top_token_ids, np.argsort(-logits, kind="stable"))


@pytest.mark.parametrize("V", [1, 31, 33])
def test_tiny_and_odd_vocabularies(V: int) -> None:
    rng = np.random.default_rng(V)
    params = [
        {"temperature": 0.0},
        {},
        {"top_k": 2, "top_p": 0.9},
        {"repetition_penalty": 1.5},
        {"allowed_token_ids": (V - 1,)},
        {"logprobs": 20},
    ]
    rows = [
        Row(
            logits=rng.normal(size=V).astype(np.float32), params=SamplingParams(**p), prompt=[V - 1]
        )
        for p in params
    ]
    result = run(rows, 8)
    assert not result.corrupted.any()
    for row, token in zip(rows, result.token_ids, strict=True):
        assert law(row)[token] > 0


def test_no_parameter_recompiles() -> None:
    rows = all_rows()
    run(rows[:1], 32)
    compiled = step._cache_size()
    for i in range(len(rows)):
        run(rows[i:], 32)
    assert step._cache_size() == compiled
