"""Every built-in logits processor does what its numpy twin does, and refuses bad parameters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from jaxinfer import builtin_processors as built_in
from jaxinfer.errors import ConfigError, InvalidRequestError
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.processing import ProcessorKind, Row

V, S = 50, 40
RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, 6, 30).tolist()  # few different ones, so that much repeats
NUM_PROMPT = 20


@functools.cache
def compiled(kind: ProcessorKind):
    return jax.jit(kind.run)


def apply(processor: LogitsProcessor, logits: np.ndarray, tokens=TOKENS, seed: int = 0):
    kind, leaves = ProcessorKind.of(processor)
    padded = np.full(S, -1, np.int32)
    padded[: len(tokens)] = tokens
    row = Row(
        token_ids=jnp.asarray(padded),
        num_tokens=jnp.int32(len(tokens)),
        num_prompt_tokens=jnp.int32(NUM_PROMPT),
        key=jax.random.key(seed, impl="threefry2x32"),
    )
    out, _ = compiled(kind)(jnp.asarray(logits, jnp.float32), tuple(leaves), row)
    return np.asarray(out)


def some_logits(i: int) -> np.ndarray:
    logits = RNG.normal(size=V).astype(np.float32) * (1 + i)
    if i % 2:
        logits[RNG.integers(0, V, 5)] = -np.inf
    return logits


def typical_p(x, p):
    logprobs = log_softmax(x.astype(np.float64))
    probs = np.exp(logprobs)
    with np.errstate(invalid="ignore"):
        entropy = -np.nansum(probs * logprobs)
    order = np.argsort(np.abs(-logprobs - entropy), kind="stable")
    count = int(np.sum(np.cumsum(probs[order]) < p)) + 1
    return np.isin(np.arange(len(x)), order[:count])


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("p", [0.2, 0.9])
def test_typical_p_keeps_the_tokens_of_the_expected_surprise(i, p):
    x = some_logits(i)
    out = apply(built_in.typical_p(p), x)
    keep = typical_p(x, p)
    np.testing.assert_array_equal(np.isfinite(out), keep & np.isfinite(x))
    np.testing.assert_array_equal(out[keep], x[keep])


@pytest.mark.parametrize("i", range(4))
def test_top_n_sigma_keeps_what_is_near_the_highest(i):
    x = some_logits(i)
    out = apply(built_in.top_n_sigma(1.5), x)
    keep = x >= x.max() - 1.5 * x[np.isfinite(x)].std()
    np.testing.assert_array_equal(out, np.where(keep, x, -np.inf))


@pytest.mark.parametrize("epsilon", [0.05, 0.99])
def test_epsilon_cutoff_keeps_the_likely_and_the_likeliest(epsilon):
    x = some_logits(1)
    keep = (softmax(x) >= epsilon) | (x == x.max())
    np.testing.assert_array_equal(
        apply(built_in.epsilon_cutoff(epsilon), x), np.where(keep, x, -np.inf)
    )


def test_xtc_drops_all_but_the_least_of_the_top_as_often_as_asked():
    x = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))
    dropped = np.where([True, True, False, False, False], -np.inf, x).astype(np.float32)
    np.testing.assert_array_equal(apply(built_in.xtc(1.0, 0.1), x), dropped)
    np.testing.assert_array_equal(apply(built_in.xtc(0.0, 0.1), x), x)
    np.testing.assert_array_equal(apply(built_in.xtc(1.0, 0.5), x), x)
    outs = [np.isinf(apply(built_in.xtc(0.5, 0.1), x, seed=i)).any() for i in range(40)]
    assert 8 < sum(outs) < 32


def test_dynamic_temperature_follows_the_entropy():
    sure = np.where(np.arange(V) == 7, 50, 0).astype(np.float32)
    np.testing.assert_allclose(apply(built_in.dynamic_temperature(0.5, 2.0), sure), sure / 0.5)
    flat = np.ones(V, np.float32)
    np.testing.assert_allclose(
        apply(built_in.dynamic_temperature(0.5, 2.0), flat), flat / 2, rtol=1e-5
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 9, 30])
def test_no_repeat_ngram_rules_out_what_would_repeat(size, count):
    tokens = TOKENS[:count]
    x = some_logits(0)
    last = tokens[len(tokens) - size + 1 :] if size > 1 else []
    ngrams = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    banned = {g[-1] for g in ngrams if g[:-1] == last and len(last) == size - 1}
    out = apply(built_in.no_repeat_ngram(size), x, tokens)
    assert set(np.flatnonzero(np.isinf(out))) == banned


def repeats(tokens, breakers) -> dict[int, int]:
    """Return, for each token, the longest repetition that it would continue."""
    found: dict[int, int] = {}
    for i in range(1, len(tokens)):
        n = 0
        while n < i and tokens[i - 1 - n] == tokens[-1 - n] and tokens[-1 - n] not in breakers:
            n += 1
        found[tokens[i]] = max(found.get(tokens[i], 0), n)
    return found


@pytest.mark.parametrize("breakers", [(), (3,), (0, 4)])
@pytest.mark.parametrize("count", [1, 12, 30])
def test_dry_punishes_the_longest_repetition(breakers, count):
    tokens = (TOKENS[:9] * 4)[:count]
    x = some_logits(0)
    expected = x.astype(np.float64)
    for token, n in repeats(tokens, breakers).items():
        if n >= 2:
            expected[token] -= 0.8 * 1.75 ** (n - 2)
    out = apply(built_in.dry(breakers=breakers), x, tokens)
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_the_end_becomes_likelier_behind_its_length():
    x = some_logits(0)
    out = apply(built_in.exponential_decay_length(7, 4, 1.5), x)  # 10 tokens of output
    x[7] += abs(x[7]) * (1.5**6 - 1)
    np.testing.assert_allclose(out, x, rtol=1e-5)
    early = apply(built_in.exponential_decay_length(7, 11, 1.5), x)
    np.testing.assert_array_equal(early, x)


def test_every_built_in_one_can_be_made_without_arguments_and_traced():
    for name, make in built_in.BUILT_INS.items():
        assert make.__doc__ and built_in.find_processor(name).function is make().function
        ProcessorKind.of(make())[0].check(V, S)


@pytest.mark.parametrize(
    "make",
    [
        lambda: built_in.typical_p(0),
        lambda: built_in.typical_p(float("nan")),
        lambda: built_in.top_n_sigma(-1),
        lambda: built_in.epsilon_cutoff("a"),
        lambda: built_in.xtc(2.0),
        lambda: built_in.dynamic_temperature(2, 1),
        lambda: built_in.no_repeat_ngram(0),
        lambda: built_in.dry(breakers=range(33)),
        lambda: built_in.exponential_decay_length(factor=0.5),
    ],
)
def test_parameters_out_of_range_are_refused(make):
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.param == "logits_processors"


def test_a_setting_names_a_built_in_one_or_an_import():
    named = built_in.find_processor("jaxinfer.builtin_processors:xtc")
    assert named.function is built_in.xtc().function
    for wrong in ("typical", "jaxinfer.nowhere:f", "jaxinfer.builtin_processors:V", "math:pi"):
        with pytest.raises(ConfigError, match=r"logits_processors"):
            built_in.find_processor(wrong)
