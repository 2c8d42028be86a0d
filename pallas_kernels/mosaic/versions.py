"""Where JAX 0.11.2 and 0.12 differ in how a Mosaic GPU kernel has to be written."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shapes import Array


def store_unswizzled(ref: Any, value: Array) -> None:
    """Store registers into shared memory whose layout makes threads wait for each other.

    From 0.12 on that has to be allowed: an assignment asks for a layout without such conflicts, and
    the search for one takes exponential time. 0.11.2 allows it silently.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
