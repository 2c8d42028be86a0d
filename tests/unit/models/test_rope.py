"""Phases against float64, and the stretches of the context against their papers' formulas."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.nn.rope import RopeTable, apply_rope, phases_at
from jaxinfer.nn.rope_scaling import RopeConfig, RopeScaling

FACTORS = tuple(1.0 + i / 7 for i in range(32))
SCALINGS = {
    "default": RopeScaling(),
    "linear": RopeScaling(rope_type="linear", factor=8.0),
    "llama3": RopeScaling(rope_type="llama3", factor=32.0),
    "yarn": RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768),
    "longrope": RopeScaling(
        rope_type="longrope", factor=32.0, long_factor=FACTORS, short_factor=(1.0,) * 32
    ),
    "dynamic": RopeScaling(rope_type="dynamic", factor=2.0),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("start", [0, 32_768, 131_072, 1_000_000, 10_000_000])
def test_phases_equal_float64(kind: str, start: int) -> None:
    rope = RopeConfig(rope_theta=500_000.0, rotary_dim=64, scaling=SCALINGS[kind])
    inv_freq = rope.for_length(1_048_576).inverse_frequencies()
    positions = np.arange(start, start + 512)
    exact = positions[:, None] * inv_freq
    phases = np.asarray(phases_at(jnp.asarray(positions, jnp.int32), inv_freq), np.float64)
    assert np.abs(phases).max() <= np.pi + 0.01
    off = np.remainder(phases - exact + np.pi, 2 * np.pi) - np.pi
    # A float32 near pi is 2.4e-7 apart from the next.
    assert np.abs(off).max() < 1e-6


def test_a_float32_product_would_not_do() -> None:
    """What the integer arithmetic is for; if this fails, it is not needed any more."""
    inv_freq = RopeConfig(rotary_dim=64).inverse_frequencies()
    positions = np.arange(131_000, 131_072)
    product = positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)
    assert np.abs(product - positions[:, None] * inv_freq).max() > 1e-3


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [16, 4])
def test_rotation_is_that_of_complex_numbers(interleaved: bool, rotary_dim: int) -> None:
    rope = RopeConfig(rotary_dim=rotary_dim, interleaved=interleaved)
    x = np.random.default_rng(0).normal(size=(5, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 7, 300, 131_072])
    got = np.asarray(apply_rope(jnp.asarray(x), RopeTable.at(jnp.asarray(positions), rope)))
    half = rotary_dim // 2
    real, imaginary = (
        (np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2))
        if interleaved
        else (np.arange(half), np.arange(half, rotary_dim))
    )
    turn = np.exp(1j * positions[:, None] * rope.inverse_frequencies())[:, None, :]
    z = (x[..., real] + 1j * x[..., imaginary]) * turn
    expected = x.copy()
    expected[..., real], expected[..., imaginary] = z.real, z.imag
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_longrope_takes_its_list_by_the_longest_sequence() -> None:
    scaling = dataclasses.replace(SCALINGS["longrope"], original_max_position_embeddings=4096)
    rope = RopeConfig(rotary_dim=64, scaling=scaling)
    plain = RopeConfig(rotary_dim=64).inverse_frequencies()
    short, long = rope.for_length(4096), rope.for_length(4097)
    np.testing.assert_allclose(short.inverse_frequencies(), plain)
    np.testing.assert_allclose(long.inverse_frequencies() * FACTORS, plain)
    # sqrt(1 + ln(32) / ln(4096)), whichever list it is
    assert short.attention_factor == long.attention_factor == pytest.approx(1.1902380714)


def test_dynamic_stretches_only_past_the_original_length() -> None:
    rope = RopeConfig(rotary_dim=64, scaling=SCALINGS["dynamic"])
    plain = RopeConfig(rotary_dim=64).inverse_frequencies()
    np.testing.assert_allclose(rope.for_length(8192).inverse_frequencies(), plain)
    stretched = rope.for_length(16_384).inverse_frequencies()
    # The lowest frequency is stretched by the whole ratio: 2 * 2 - (2 - 1).
    assert plain[-1] / stretched[-1] == pytest.approx(3.0)
    assert stretched[0] == plain[0]


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    rope = RopeConfig(rope_theta=1e6, rotary_dim=128, scaling=SCALINGS["yarn"])
    ratio = (
        rope.inverse_frequencies()
        / RopeConfig(rope_theta=1e6, rotary_dim=128).inverse_frequencies()
    )
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 4)
    assert (np.diff(ratio) <= 0).all()
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def test_a_rope_that_depends_on_the_length_refuses_to_guess_it() -> None:
    with pytest.raises(NotImplementedError, match="longrope"):
        RopeConfig(rotary_dim=64, scaling=SCALINGS["longrope"]).inverse_frequencies()
