"""Writing new keys and values into pages, in place and all in one launch.

A kernel that multiplies as well (grouped products of a mixture of experts, products with quantized
weights) gets a file of its own beside this one, and an entry beside `pallas_kernels.write_kv`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kv_pages import KVPages, has_scales, quantize
from pallas_kernels.shapes import Array, Float, Int
from pallas_kernels.triton import backend
from pallas_kernels.triton.backend import load, store
from pallas_kernels.triton.decode_shape import iota

BLOCK_T = 16
"""Tokens that one program writes, of one head."""


def triton_write_kv(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pages: KVPages,
    slot_mapping: Int[Array, " T"],
    *,
    interpret: bool = False,
) -> KVPages:
    """Return what `pallas_kernels.write_kv` promises; the pages given are overwritten.

    Raises:
        NotImplementedError: The pages are so many that offsets into them overflow.
    """
    T, K, _ = k.shape
    backend.check_offsets(*jax.tree.leaves(pages))
    new = (k, v, slot_mapping)
    first = len(jax.tree.leaves(new))
    written = backend.call(
        _write_kernel,
        name="write_kv",
        grid=(pl.cdiv(T, BLOCK_T), K),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pages),
        num_warps=4,
        num_stages=1,
        input_output_aliases={first + i: i for i in range(len(jax.tree.leaves(pages)))},
        interpret=interpret,
    )(*new, pages)
    return KVPages(*written)


def _write_kernel(
    k_ref,  # [T, K, H]
    v_ref,  # [T, K, H] or None
    slots_ref,  # [T]
    _,  # `KVPages` of the following, before
    k_pages_ref,  # [num_pages, K, page_size, H]
    v_pages_ref,  # [num_pages, K, page_size, H] or None
    k_scales_ref,  # [num_pages, K, page_size] or None
    v_scales_ref,  # [num_pages, K, page_size] or None
) -> None:
    """Write `BLOCK_T` tokens of one head."""
    T, _, H = k_ref.shape
    num_pages, _, page_size, _ = k_pages_ref.shape
    head = pl.program_id(1)
    tokens, d = pl.program_id(0) * BLOCK_T + iota(BLOCK_T), iota(pl.next_power_of_2(H))
    slots = load(slots_ref, (tokens,), mask=tokens < T)
    # Padding tokens have slots outside of the pages.
    used = (tokens < T) & (slots >= 0) & (slots < num_pages * page_size)
    # The interpreter writes back what is masked: only behind the pages does that change nothing.
    page, offset = jnp.where(used, slots // page_size, num_pages), slots % page_size
    used_block = used[:, None] & (d < H)[None, :]

    def write(new_ref, stored_ref, scales_ref) -> None:
        new = load(new_ref, (tokens[:, None], head, d[None, :]), mask=used_block)
        if has_scales(stored_ref.dtype):
            new, scales = quantize(new, stored_ref.dtype)
            store(scales_ref, (page, head, offset), scales, mask=used)
        index = (page[:, None], head, offset[:, None], d[None, :])
        store(stored_ref, index, new.astype(stored_ref.dtype), mask=used_block)

    write(k_ref, k_pages_ref, k_scales_ref)
    if v_ref is not None:
        write(v_ref, v_pages_ref, v_scales_ref)
