"""Which attention calls the Hopper kernels do, in words: other kernels do what they refuse."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.capability import current_device
from pallas_kernels.shapes import Array

COMPUTE_CAPABILITY = (9, 0)
"""The one generation that has these kernels' instructions: TMA with wgmma."""

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16")


def refusal(
    compute_capability: tuple[int, int] | None,
    *,
    dtype: Any,
    kv_dtype: Any,
    head_dim: int,
    page_size: int,
) -> str | None:
    """Say why the Hopper kernels cannot do a call; None if they can.

    Args:
        compute_capability: Of the device; None for what is no NVIDIA GPU.
        dtype: Of the queries.
        kv_dtype: Of the pages.
        head_dim: H.
        page_size: Tokens per page.
    """
    if compute_capability != COMPUTE_CAPABILITY:
        found = "none" if compute_capability is None else "{}.{}".format(*compute_capability)
        return f"needs compute capability 9.0 (H100, H200), and the device has {found}"
    dtype, kv_dtype = jnp.dtype(dtype).name, jnp.dtype(kv_dtype).name
    if dtype not in DTYPES:
        return f"takes queries of {' or '.join(DTYPES)}, got {dtype}"
    if kv_dtype != dtype:
        return f"takes pages in the dtype of the queries, {dtype}, got {kv_dtype}"
    if head_dim not in HEAD_DIMS:
        return f"takes head dims {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    if page_size < 8 or page_size & (page_size - 1):
        return f"takes pages of a power of two of tokens, at least 8, got {page_size}"
    return None


def require(q: Array, k_pages: Array, *, scale: float, interpret: Any) -> None:
    """Refuse a call before it is compiled: an instruction that a GPU lacks ends the process.

    Args:
        q: [T, N, H].
        k_pages: [num_pages, K, page_size, H].
        scale: Multiplies the scores.
        interpret: The interpreter runs on any device.

    Raises:
        NotImplementedError: With what `refusal` says.
        ValueError: The scale is not positive.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    reason = refusal(
        COMPUTE_CAPABILITY if interpret else current_device().compute_capability,
        dtype=q.dtype,
        kv_dtype=k_pages.dtype,
        head_dim=q.shape[2],
        page_size=k_pages.shape[2],
    )
    if reason is not None:
        raise NotImplementedError(f"the attention kernel for Hopper {reason}")
