"""Order statistics against numpy's sorts, exactly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.selection import bisect, highest, invert_cdf, top_values

LAST_U = 1 - 2.0**-24  # the largest number the sampler draws

jit_invert_cdf = jax.jit(invert_cdf)


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


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from([0.01, 0.3, 1.0]),
    us=st.lists(st.floats(0, LAST_U, width=32), min_size=4, max_size=4),
)
def test_inverse_cdf_equals_float64_and_never_picks_weight_zero(
    seed: int, density: float, us: list[float]
) -> None:
    V = 700  # three blocks, the last one partly padding
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(size=(4, V)) * 8).astype(np.float32)
    weights *= rng.random((4, V)) < density
    weights[:, rng.integers(V)] += np.float32(1e-20)
    tokens = np.asarray(jit_invert_cdf(weights, np.array(us, np.float32)))
    for row, u, token in zip(weights.astype(np.float64), us, tokens, strict=True):
        assert row[token] > 0
        reached = np.cumsum(row) / row.sum()
        below = reached[token - 1] if token else 0.0
        # Float32 sums over blocks of 256: relative error well below 1e-5.
        assert below - 1e-5 <= u <= reached[token] + 1e-5


@pytest.mark.parametrize("u", [0.0, 2.0**-24, LAST_U])
@pytest.mark.parametrize("V", [1, 255, 256, 257, 1000])
def test_inverse_cdf_at_the_edges_stays_on_positive_weights(u: float, V: int) -> None:
    rng = np.random.default_rng(V)
    only = rng.integers(0, V, 3)
    weights = np.zeros((3, V), np.float32)
    weights[np.arange(3), only] = [1.0, 1e-30, 1e30]
    np.testing.assert_array_equal(jit_invert_cdf(weights, np.full(3, u, np.float32)), only)


def test_inverse_cdf_gives_flat_weights_equal_shares() -> None:
    V, n = 1000, 50_000
    u = ((np.arange(n) + 0.5) / n).astype(np.float32)
    tokens = jax.jit(jax.vmap(lambda u: invert_cdf(jnp.ones((1, V)), u[None])[0]))(u)
    counts = np.bincount(np.asarray(tokens), minlength=V)
    assert counts.min() >= n // V - 1
    assert counts.max() <= n // V + 1
