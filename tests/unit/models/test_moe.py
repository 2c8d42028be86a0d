"""Mixtures of experts against a loop over tokens: none dropped, padding nowhere."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.nn.moe import MoE, MoEConfig, grouped_matmul, route

D, E, F = 8, 6, 5
CONFIG = MoEConfig(num_experts=E, num_experts_per_tok=2, intermediate_size=F)


@pytest.fixture
def moe() -> MoE:
    module = MoE(D, CONFIG, activation="silu", dtype=jnp.float32)
    rng = np.random.default_rng(0)
    for _, parameter in nnx.to_flat_state(nnx.state(module)):
        shape = parameter.shape
        parameter[...] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return module


def by_tokens(moe: MoE, x: np.ndarray) -> np.ndarray:
    """Each token on its own, in float64."""
    gates, ups, downs = (np.asarray(p[...], np.float64) for p in (moe.gate, moe.up, moe.down))
    router = np.asarray(moe.router.kernel[...], np.float64)
    out = np.zeros_like(x, np.float64)
    for t, token in enumerate(x.astype(np.float64)):
        p = np.exp(token @ router)
        chosen = np.argsort(-p)[: CONFIG.num_experts_per_tok]
        for e in chosen:
            gate, up = token @ gates[e], token @ ups[e]
            out[t] += p[e] / p[chosen].sum() * ((gate / (1 + np.exp(-gate)) * up) @ downs[e])
    return out


def test_each_token_visits_its_best_experts(moe: MoE) -> None:
    x = np.random.default_rng(1).normal(size=(40, D)).astype(np.float32)
    got = moe(jnp.asarray(x), jnp.ones(40, bool))
    np.testing.assert_allclose(np.asarray(got), by_tokens(moe, x), rtol=1e-4, atol=1e-4)


def test_no_token_is_dropped_when_all_want_the_same_expert(moe: MoE) -> None:
    x = np.tile(np.random.default_rng(2).normal(size=(1, D)), (64, 1)).astype(np.float32)
    got = np.asarray(moe(jnp.asarray(x), jnp.ones(64, bool)))
    np.testing.assert_allclose(got, by_tokens(moe, x), rtol=1e-4, atol=1e-4)


def test_a_steady_mixture_is_the_same_function_whoever_else_is_there(
    moe: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the order of summation; and bitwise, the others being replaced by NaN or by copies.

    Without groups: XLA:CPU happens to sum those the same way whatever their sizes, others do not.
    """
    x = np.random.default_rng(1).normal(size=(40, D)).astype(np.float32)
    is_real = jnp.ones(40, bool)
    loose = moe(jnp.asarray(x), is_real)
    moe.steady = True
    monkeypatch.delattr("jaxinfer.nn.moe.grouped_matmul")
    got = np.asarray(moe(jnp.asarray(x), is_real))
    np.testing.assert_allclose(got, by_tokens(moe, x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got, np.asarray(loose), rtol=1e-5, atol=1e-5)
    for others in (np.full_like(x, np.nan), np.tile(x[:1], (40, 1))):
        others[7] = x[7]
        np.testing.assert_array_equal(np.asarray(moe(jnp.asarray(others), is_real))[7], got[7])


def test_padding_visits_no_expert(moe: MoE, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it holds, NaN included, and it is counted in no group."""
    x = np.random.default_rng(3).normal(size=(16, D)).astype(np.float32)
    padded = np.concatenate([x, np.full((16, D), np.nan, np.float32)])
    counted = []

    def counting(x, kernels, sizes):
        counted.append(int(sizes.sum()))
        return grouped_matmul(x, kernels, sizes)

    monkeypatch.setattr("jaxinfer.nn.moe.grouped_matmul", counting)
    got = np.asarray(moe(jnp.asarray(padded), jnp.arange(32) < 16))
    assert counted == [32, 32, 32]  # 16 tokens, 2 experts each; gate, up, down
    np.testing.assert_allclose(got[:16], by_tokens(moe, x), rtol=1e-4, atol=1e-4)
    assert (got[16:] == 0).all()


@pytest.mark.parametrize(("group_top", "chosen"), [(1, {0, 1}), (2, {4, 5})])
def test_groups_limit_the_choice(group_top: int, chosen: set[int]) -> None:
    config = MoEConfig(
        num_experts=6,
        num_experts_per_tok=2,
        intermediate_size=1,
        scoring="sigmoid",
        num_groups=3,
        group_top=group_top,
    )
    # The best expert is in the first group, the best pair in the last; without groups, 0 and 4.
    logits = jnp.asarray([[5.0, -9.0, 0.0, 0.0, 2.1, 2.0]])
    weights, experts = route(logits, None, config)
    assert set(np.asarray(experts)[0].tolist()) == chosen
    assert weights.sum() == pytest.approx(1.0)


def test_a_correction_chooses_and_does_not_weigh() -> None:
    config = MoEConfig(
        num_experts=4,
        num_experts_per_tok=1,
        intermediate_size=1,
        scoring="sigmoid",
        norm_topk_prob=False,
        routed_scaling_factor=2.0,
    )
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    weights, experts = route(logits, jnp.asarray([0.0, 0.0, 0.9, 0.0]), config)
    assert experts.tolist() == [[2]]
    assert weights[0, 0] == pytest.approx(2 * 0.5)
