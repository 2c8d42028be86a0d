"""Order statistics against numpy's sorts, exactly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.selection import bisect, highest, race, top_values

jit_race = jax.jit(race)


def values(rng: np.random.Generator, B: int, V: int) -> np.ndarray:
    """Random rows with ties, both zeros, -inf and neighbouring floats."""
    x = rng.normal(size=(B, V)).astype(np.float32)
    x[:, ::3] = np.round(x[:, ::3] * 2) / 2
    x[:, 4::7] = -np.inf
    x[:, 1::11] = -0.0
    x[:, 2::5] = np.nextafter(x[0, 0], np.float32(9))
    return x


@pytest.mark.parametrize("V", [1, 31, 300, 5000])
def test_highest_is_the_first_maximum(V: int) -> None:
    x = values(np.random.default_rng(V), 4, V)
    peak, index = highest(jnp.asarray(x))
    np.testing.assert_array_equal(index, np.argmax(x, -1))
    np.testing.assert_array_equal(peak, x.max(-1))


def test_highest_of_a_row_with_nan_is_inf_and_its_index_stays_in_range() -> None:
    x = np.array([[0, np.nan, 1], [0, 2, 1], [np.nan] * 3], np.float32)
    peak, index = highest(jnp.asarray(x))
    np.testing.assert_array_equal(peak, np.array([np.inf, 2, np.inf], np.float32))
    assert index[1] == 1
    assert all(0 <= i < 3 for i in index.tolist())


@pytest.mark.parametrize(("V", "K"), [(5, 5), (300, 128), (4096, 128), (4097, 128), (9000, 200)])
def test_top_values_equal_a_sort(V: int, K: int) -> None:
    x = values(np.random.default_rng(V), 3, V)
    np.testing.assert_array_equal(jax.jit(top_values, static_argnums=1)(x, K), -np.sort(-x)[:, :K])


@pytest.mark.parametrize("V", [3, 40, 1000])
def test_bisection_finds_the_kth_largest_exactly(V: int) -> None:
    rng = np.random.default_rng(V)
    x = values(rng, 16, V)
    k = rng.integers(1, V + 1, 16)
    found = bisect(
        lambda t: jnp.sum(x >= t[:, None], axis=-1) >= k,
        low=jnp.full(16, -jnp.inf),
        high=jnp.asarray(x.max(-1)),
    )
    kth = np.array([-np.sort(-row)[i - 1] for row, i in zip(x, k, strict=True)], np.float32)
    # A CPU that treats subnormals as zeros finds the largest of them for 0: the same threshold.
    np.testing.assert_array_equal(x >= found[:, None], x >= kth[:, None])
    np.testing.assert_allclose(found, kth, rtol=0, atol=np.finfo(np.float32).tiny)


def test_bisection_leaves_rows_with_equal_bounds_alone() -> None:
    low = jnp.array([-jnp.inf, 0.0, 1.5, -2.0])
    high = jnp.array([-jnp.inf, 0.0, 3.0, -2.0])
    found = bisect(lambda t: t <= jnp.array([9.0, 9, 2, -9]), low=low, high=high)
    np.testing.assert_array_equal(found, [-np.inf, 0, 2, -2])


def keys(first: int, count: int) -> jax.Array:
    """Distinct keys, the same ones each time."""
    return jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(1), jnp.arange(first, first + count)
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), density=st.sampled_from([0.01, 0.3, 1.0]))
def test_race_never_returns_weight_zero(seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.exp(-np.abs(rng.normal(size=(4, 700))) * 40).astype(np.float32)
    weights *= rng.random((4, 700)) < density
    weights[np.arange(4), rng.integers(700, size=4)] = 1
    winners = np.asarray(jit_race(weights, keys(seed % 1000, 4)))
    assert (weights[np.arange(4), winners] > 0).all()


def test_race_draws_in_proportion_to_the_weights() -> None:
    weights = np.array([1, 0.5, 0.25, 0.25, 0, 0.01], np.float32)
    n = 40_000
    winners = jax.jit(jax.vmap(lambda k: race(weights[None], k[None])[0]))(keys(0, n))
    counts = np.bincount(np.asarray(winners), minlength=6)
    expected = n * weights.astype(np.float64) / weights.sum()
    seen = expected > 0
    chi2 = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    assert chi2 < 18.5  # 99.9 % of 4 degrees of freedom
    assert counts[4] == 0


def test_race_reaches_far_into_the_tail() -> None:
    """A tail of many tokens, each unlikelier than 2**-24, still gets its share as a whole."""
    V = 4096
    weights = np.full((1, V), 0.25 / (V - 1) / 1000, np.float32)
    weights[0, 0] = 1
    n = 20_000
    draw = jax.jit(lambda ks: jax.lax.map(lambda k: race(weights, k[None])[0], ks))
    share = np.mean(np.asarray(draw(keys(0, n))) > 0)
    expected = 0.00025 / 1.00025
    assert abs(share * n - expected * n) < 4 * np.sqrt(expected * n)


def test_race_of_a_row_depends_on_its_key_alone() -> None:
    rng = np.random.default_rng(0)
    weights = np.exp(rng.normal(size=(8, 1000))).astype(np.float32)
    weights /= weights.max(-1, keepdims=True)
    together = np.asarray(jit_race(weights, keys(5, 8)))
    alone = [int(jit_race(weights[i : i + 1], keys(5 + i, 1))[0]) for i in range(8)]
    assert together.tolist() == alone
    # A vocabulary padded with impossible tokens draws the same ones.
    padded = np.pad(weights, ((0, 0), (0, 24)))
    assert np.asarray(jit_race(padded, keys(5, 8))).tolist() == alone


def test_race_survives_the_noise_between_batch_shapes() -> None:
    """Logits that differ by 5e-6 give the same draws; an inverted CDF changed 8 of 2,000."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(16, 20_000)) * 2.5).astype(np.float32)
    noisy = logits + rng.normal(size=logits.shape).astype(np.float32) * np.float32(5e-6)

    def weights(x: np.ndarray) -> np.ndarray:
        return np.exp(x - x.max(-1, keepdims=True))

    changed = 0
    for i in range(60):
        k = keys(16 * i, 16)
        changed += int(np.sum(jit_race(weights(logits), k) != jit_race(weights(noisy), k)))
    assert changed == 0
