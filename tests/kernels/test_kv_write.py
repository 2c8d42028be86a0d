"""Writing keys and values into pages: what the kernel writes, what XLA writes, what was given."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import KVPages, has_scales, write_kv
from pallas_kernels.kv_pages import LARGEST, quantize
from pallas_kernels.triton import kv_write
from pallas_kernels.triton.kv_write import triton_write_kv
from tests.kernels.bounds import strict_bounds

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
NUM_PAGES, PAGE_SIZE, K = 7, 4, 3
NUM_SLOTS = NUM_PAGES * PAGE_SIZE


def make_pages(rng: np.random.Generator, dtype: str, H: int, has_values: bool = True) -> KVPages:
    """Return pages full of numbers that must stay where nothing is written."""

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(-99, 99, shape), jnp.float32)

    shape = (NUM_PAGES, K, PAGE_SIZE)
    k, v = numbers(*shape, H).astype(dtype), numbers(*shape, H).astype(dtype)
    scales = (numbers(*shape), numbers(*shape)) if has_scales(dtype) else (None, None)
    return KVPages(k, v, *scales) if has_values else KVPages(k, None, scales[0])


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@settings(max_examples=12)
@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([64, 80]),
    has_values=st.booleans(),
    num_tokens=st.sampled_from([1, 15, 16, 17, 40]),
    used=st.integers(0, NUM_SLOTS),
    seed=st.integers(0, 99),
)
def test_the_kernel_writes_what_xla_scatters_bit_by_bit(
    dtype: str, head_dim: int, has_values: bool, num_tokens: int, used: int, seed: int
) -> None:
    """And nothing else: padding, in whatever slot outside of the pages, leaves no trace."""
    rng = np.random.default_rng(seed)
    pages = make_pages(rng, dtype, head_dim, has_values)
    k, v = (jnp.asarray(rng.normal(size=(num_tokens, K, head_dim)), jnp.bfloat16) for _ in "kv")
    slots = rng.choice([-1, -NUM_SLOTS, NUM_SLOTS, NUM_SLOTS + 5, 2**31 - 1], num_tokens)
    used = min(used, num_tokens)
    slots[rng.permutation(num_tokens)[:used]] = rng.permutation(NUM_SLOTS)[:used]
    slots = jnp.asarray(slots, jnp.int32)
    ways = {}
    for impl in ("xla", "interpret"):
        write = jax.jit(partial(write_kv, impl=impl))
        ways[impl] = write(k, v if has_values else None, pages, slots)
        assert jax.tree.structure(ways[impl]) == jax.tree.structure(pages)
    for scattered, written, before in zip(
        *map(jax.tree.leaves, (*ways.values(), pages)), strict=True
    ):
        np.testing.assert_array_equal(bits(scattered), bits(written))
        kept = np.ones((NUM_PAGES, PAGE_SIZE), bool)
        kept.flat[slots[(slots >= 0) & (slots < NUM_SLOTS)]] = False
        same = (np.asarray(written) == np.asarray(before)).reshape(NUM_PAGES, K, PAGE_SIZE, -1)
        assert same.all((1, 3))[kept].all()


@pytest.mark.parametrize("impl", ["xla", "interpret"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_back_is_what_was_given(impl: str, dtype: str) -> None:
    """Exact for floats; int8 within half a step of 1/127, float8 within 2**-4 of each number."""
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(5, K, 64)) * 10.0 ** rng.integers(-4, 4, (5, K, 1)), "float32")
    k = k.astype(dtype if not has_scales(dtype) else "float32")
    slots = jnp.asarray(rng.permutation(NUM_SLOTS)[:5], jnp.int32)
    pages = write_kv(k, None, make_pages(rng, dtype, 64, has_values=False), slots, impl=impl)
    stored = pages.k_pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE].astype(jnp.float32)
    if pages.k_scales is not None:
        stored *= pages.k_scales[slots // PAGE_SIZE, :, slots % PAGE_SIZE][..., None]
    given_ = np.asarray(k.astype(jnp.float32))
    largest = np.abs(given_).max(-1, keepdims=True)
    # Half a step, and float32's rounding of the division and the product.
    allowed = {"int8": (0, 0.5 / 127 * 1.001), "float8_e4m3fn": (2**-4, 2**-9 / 448)}
    relative, absolute = allowed.get(dtype, (0, 0))
    error = np.abs(np.asarray(stored) - given_)
    assert (error <= relative * np.abs(given_) + absolute * largest).all()


@pytest.mark.parametrize("dtype", LARGEST)
def test_bad_numbers_stay_visible_and_zeros_stay_zero(dtype: str) -> None:
    x = jnp.asarray([[0.0, 0.0], [1.0, jnp.nan], [1.0, jnp.inf], [1e-38, 0.0]])
    values, scales = quantize(x, dtype)
    back = np.asarray(values.astype(jnp.float32) * scales[:, None])
    assert not back[0].any()
    assert np.isnan(back[1]).all()
    assert not np.isfinite(back[2]).any()
    assert np.abs(back[3]).max() <= 1e-38


def test_nothing_outside_of_an_array_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by padding tokens, and not by tokens and dimensions that fill up a block."""
    rng = np.random.default_rng(0)
    pages = make_pages(rng, "int8", 80)
    k, v = (jnp.asarray(rng.normal(size=(11, K, 80)), jnp.float32) for _ in "kv")
    slots = jnp.asarray([*rng.permutation(NUM_SLOTS)[:7], -1, -9, NUM_SLOTS, 2**31 - 1], jnp.int32)
    expected = write_kv(k, v, pages, slots, impl="xla")
    with strict_bounds(monkeypatch, kv_write):
        written = write_kv(k, v, pages, slots, impl="interpret")
    for array, other in zip(written, expected, strict=True):
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_every_result_of_the_kernel_is_one_of_its_arguments(dtype: str) -> None:
    """Donated pages have no second copy, whatever XLA would do."""
    pages = make_pages(np.random.default_rng(0), dtype, 64)
    new, slots = jnp.zeros((8, K, 64)), jnp.zeros(8, jnp.int32)
    write = partial(triton_write_kv, interpret=True)
    (call,) = (
        equation
        for equation in jax.make_jaxpr(write)(new, new, pages, slots).eqns
        if equation.primitive.name == "pallas_call"
    )
    aliases = {output: call.invars[i] for i, output in call.params["input_output_aliases"]}
    assert len(aliases) == len(call.outvars) == len(jax.tree.leaves(pages))
    for i, output in enumerate(call.outvars):
        assert aliases[i].aval.shape == output.aval.shape
        assert aliases[i].aval.dtype == output.aval.dtype
