"""The one entry to writing new keys and values into pages; it picks the implementation."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.capability import Problem, choose, current_device
from pallas_kernels.kv_pages import KVPages, quantize
from pallas_kernels.ragged_batch import slot_coordinates
from pallas_kernels.shapes import Array, Float, Int


def write_kv(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pages: KVPages,
    slot_mapping: Int[Array, " T"],
    *,
    impl: str = "auto",
) -> KVPages:
    """Return pages in which the tokens' keys and values stand, each at its slot.

    Donated pages are written in place: nothing of them is copied.

    Args:
        k: New keys, of any float dtype.
        v: New values; None where keys are the values too.
        pages: To be written. Where they have scales, keys and values are quantized on the way, each
            token and head by itself.
        slot_mapping: page * page_size + offset of each token; no two alike, but for tokens outside
            [0, num_pages * page_size), which are padding and dropped.
        impl: One of `capability.IMPLEMENTATIONS`.

    Raises:
        NotImplementedError: The forced implementation cannot do this on this device.
    """
    chosen = choose(impl, current_device(), Problem.of(k, pages.k_pages))
    return _write_kv(k, v, pages, slot_mapping, impl=chosen)


# jitted so that a model's layers, which all call it with the same shapes, share one trace.
@partial(jax.jit, static_argnames="impl")
def _write_kv(
    k: Array, v: Array | None, pages: KVPages, slot_mapping: Array, *, impl: str
) -> KVPages:
    with jax.named_scope("write_kv"):
        if impl == "xla":
            return xla_write_kv(k, v, pages, slot_mapping)
        # Imported only here, so that a jaxlib without this compiler can still do the above.
        from pallas_kernels.triton.kv_write import triton_write_kv

        return triton_write_kv(k, v, pages, slot_mapping, interpret=impl == "interpret")


def xla_write_kv(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pages: KVPages,
    slot_mapping: Int[Array, " T"],
) -> KVPages:
    """Return what `write_kv` promises, by scattering."""
    num_pages, _, page_size, _ = pages.k_pages.shape
    page, offset = slot_coordinates(slot_mapping, page_size)
    # A negative index would count from the end.
    page = jnp.where(page < 0, num_pages, page)

    def write(new: Array, stored: Array, scales: Array | None) -> tuple[Array, Array | None]:
        if scales is not None:
            new, new_scales = quantize(new, stored.dtype)
            scales = scales.at[page, :, offset].set(new_scales, mode="drop")
        return stored.at[page, :, offset].set(new.astype(stored.dtype), mode="drop"), scales

    k_pages, k_scales = write(k, pages.k_pages, pages.k_scales)
    if v is None or pages.v_pages is None:
        return KVPages(k_pages, None, k_scales)
    v_pages, v_scales = write(v, pages.v_pages, pages.v_scales)
    return KVPages(k_pages, v_pages, k_scales, v_scales)
