"""What pages of keys and values store: numbers as they are, or one byte each and a scale.

Shared by all implementations, so that what one has written the others read alike. Knows nothing of
rows and tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.shapes import Array, Float

LARGEST: Mapping[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The page dtypes that have scales, and the largest number that each stores."""

SMALLEST = 1e-30
"""Vectors whose numbers are all smaller are stored as zeros: the inverse of their scale could
overflow."""


class KVPages(NamedTuple):
    """Keys and values of one layer by page.

    Attributes:
        k_pages: [num_pages, K, page_size, H] of a float dtype or one of `LARGEST`.
        v_pages: The same; None where keys are the values too.
        k_scales: float32 [num_pages, K, page_size], one per token and head; each key is the stored
            one times its scale. None for float dtypes.
        v_scales: The same of values.
    """

    k_pages: Array
    v_pages: Array | None = None
    k_scales: Array | None = None
    v_scales: Array | None = None


def has_scales(dtype: Any) -> bool:
    """Whether pages of this dtype have scales."""
    return jnp.dtype(dtype).name in LARGEST


def quantize(x: Float[Array, "*tokens H"], dtype: Any) -> tuple[Array, Array]:
    """Return a vector's numbers in one byte each, and its scale.

    The same as

        scale = abs(x).max(-1) / largest
        values = round(x / scale)

    Vectors with a NaN or an infinity get a scale that is neither: what is wrong stays visible.

    Args:
        x: Vectors.
        dtype: One of `LARGEST`.

    Returns:
        [..., H] in `dtype`, and float32 [...].
    """
    dtype = jnp.dtype(dtype)
    largest = LARGEST[dtype.name]
    x = x.astype(jnp.float32)
    magnitude = jnp.abs(x).max(-1)
    inverse = jnp.where(magnitude > SMALLEST, largest / magnitude, 0.0)
    values = x * inverse[..., None]
    if dtype == jnp.int8:
        # The kernels' compiler has no rounding but this one.
        values = jnp.floor(values + 0.5)
    return values.astype(dtype), magnitude * (1.0 / largest)


def value_dtype(query_dtype: Any, page_dtype: Any) -> Any:
    """Return what weights and values are multiplied in: as `product_dtype`, but with range.

    Weights of one-byte values carry the values' scales, which float16 rounds off below 6e-5. That
    bfloat16 has fewer digits matters less than that one byte has.
    """
    dtype = product_dtype(query_dtype, page_dtype)
    is_scaled = jnp.dtype(page_dtype).itemsize == 1
    return jnp.dtype(jnp.bfloat16) if is_scaled and dtype == jnp.float16 else dtype


def product_dtype(query_dtype: Any, page_dtype: Any) -> Any:
    """Return what queries and keys are multiplied in; 1-byte pages become queries'."""
    query_dtype, page_dtype = jnp.dtype(query_dtype), jnp.dtype(page_dtype)
    if page_dtype.itemsize == 1 or page_dtype == query_dtype:
        return query_dtype
    return jnp.dtype(jnp.float32)
