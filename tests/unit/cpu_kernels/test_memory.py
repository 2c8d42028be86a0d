"""Large pages change where arrays lie, never what they hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cpu_kernels import LargePages, memory, renew_in_large_pages
from jaxinfer.sharding import place

SHAPES = [(3,), (), (0, 4), (70, 33), (1,), (memory.CHUNK // 4 + 5,), (2, 2)]


def test_arrays_share_memory_and_keep_what_they_hold():
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    rng, pages = np.random.default_rng(0), LargePages(place)
    types = (np.uint32, np.float32, jnp.bfloat16, np.int8)
    given = [rng.integers(0, 100, s).astype(types[i % 4]) for i, s in enumerate(SHAPES)]
    arrays = [pages.put(array, sharding) for array in given]
    for array, expected in zip(arrays, given, strict=True):
        assert array.dtype == expected.dtype and array.sharding == sharding
        np.testing.assert_array_equal(np.asarray(array), expected)
    if memory.IS_LINUX:
        # Neighbours: taken by XLA as they are, or it would have copied them elsewhere.
        first, second = (arrays[i].unsafe_buffer_pointer() for i in (0, 3))
        assert second - first < memory.LARGE_PAGE, (first, second)


def test_renewed_pages_are_zeros_and_can_be_donated():
    size = 3 * memory.LARGE_PAGE // 4
    before, pages, behind = jnp.ones(7), jnp.zeros((2, size)), jnp.ones(7)
    renew_in_large_pages([pages])
    assert not np.asarray(pages).any()
    assert np.asarray(before).all() and np.asarray(behind).all()
    address = pages.unsafe_buffer_pointer()
    written = jax.jit(lambda x: x.at[1, 5].set(3.0), donate_argnums=0)(pages)
    assert written.unsafe_buffer_pointer() == address
    assert written[1, 5] == 3.0 and jnp.sum(written) == 3.0
