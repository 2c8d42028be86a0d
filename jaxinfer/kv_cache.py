"""The paged cache on the device: its layout, its size, and how a layer reads and writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer import cpu_kernels
from jaxinfer.attention_weights import paged_weights
from jaxinfer.nn.rope import RopeTable
from pallas_kernels import (
    KVPages,
    RaggedBatch,
    has_scales,
    paged_attention,
    slot_coordinates,
    write_kv,
)
from pallas_kernels.shapes import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys, values and token ids by page.

    One array per layer and kind: XLA then updates each in place. (One stacked array passed through
    a scan as input and output is copied whole every step.) Heads stand before slots, so that a
    page of one head is one contiguous tile.

    Attributes:
        layers: Of each layer the keys and values, with as many pages as the layer's group has.
        token_ids: int32 [num_pages, page_size], of the full group. What each slot holds; lets the
            sampler look up a sequence's history without shipping it from the host.
    """

    layers: tuple[KVPages, ...]
    token_ids: Array

    @property
    def page_size(self) -> int:
        return self.token_ids.shape[1]


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What decides the size of a cache.

    Attributes:
        layer_groups: Per layer, the group of pages that it uses: 0 for the full one, i + 1 for
            window i.
        num_kv_heads: K.
        head_dim: H.
        page_size: Tokens per page.
        dtype: Of keys and values as they are stored. Those of one byte have a float32 scale for
            each token and head.
        has_values: False where keys are the values too (latent attention).
    """

    layer_groups: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: Any
    has_values: bool = True

    def page_bytes(self, group: int) -> int:
        """Bytes of one page over all layers of a group, scales and token ids included."""
        vector = self.head_dim * jnp.dtype(self.dtype).itemsize + 4 * has_scales(self.dtype)
        vectors = (1 + self.has_values) * self.layer_groups.count(group) * self.num_kv_heads
        id_bytes = 0 if group else 4
        return self.page_size * (vectors * vector + id_bytes)


def make_cache(
    shape: CacheShape,
    num_pages: Sequence[int],
    shardings: tuple[Any, Any],
    zeros: Callable[..., Any] = jnp.zeros,
) -> KVCache:
    """Allocate zeroed pages, so many for each group.

    Args:
        shape: What a page holds.
        num_pages: By group.
        shardings: Those of keys, values and their scales, by axes [num_pages, K, ...], and of
            token ids.
        zeros: (shape, dtype, device=sharding) → array; `describe` allocates nothing.
    """
    kv_sharding, ids_sharding = shardings

    def layer(group: int) -> KVPages:
        vectors = (num_pages[group], shape.num_kv_heads, shape.page_size)
        make = partial(zeros, device=kv_sharding)
        kinds = 1 + shape.has_values
        pages = [make((*vectors, shape.head_dim), shape.dtype) for _ in range(kinds)]
        scales = [make(vectors, jnp.float32) for _ in range(kinds) if has_scales(shape.dtype)]
        k_pages, v_pages = (*pages, None)[:2]
        k_scales, v_scales = (*scales, None, None)[:2]
        return KVPages(k_pages, v_pages, k_scales, v_scales)

    ids = zeros((num_pages[0], shape.page_size), jnp.int32, device=ids_sharding)
    return KVCache(tuple(layer(group) for group in shape.layer_groups), ids)


def in_large_pages(cache: KVCache) -> KVCache:
    """Return a cache of zeros, for which a CPU now looks up fewer addresses."""
    cpu_kernels.renew_in_large_pages(jax.tree.leaves(cache.layers))
    return cache


def describe(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
    """Stand in for `jnp.zeros` where only the description is needed."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=device)


def write_token_ids(
    cache: KVCache, token_ids: Int[Array, " T"], slot_mapping: Int[Array, " T"]
) -> KVCache:
    """Note which token each slot holds; slots outside the pool are dropped."""
    pages, offsets = slot_coordinates(slot_mapping, cache.page_size)
    ids = cache.token_ids.at[pages, offsets].set(token_ids, mode="drop")
    return KVCache(cache.layers, ids)


class PagedAttend:
    """`jaxinfer.nn.attention.Attend` over a `KVCache`, for one trace of one step.

    Holds the functional cache while the layers run; `cache` is what to return from the step.

    Args:
        cache: The pages.
        batches: The rows and their page tables, by group.
        slot_mapping: Where each token is written, by group.
        layer_groups: Each layer's group.
        impl: "cpu" for the C++ kernel; else see `pallas_kernels.paged_attention`.
        sharding: Of the pages. Where there are several devices, each stores and attends to its own
            heads: XLA cannot divide a kernel.
        query_axes: The mesh axes over which query heads are divided; None for none.
    """

    def __init__(
        self,
        cache: KVCache,
        batches: Sequence[RaggedBatch],
        slot_mapping: Int[Array, "num_groups T"],
        *,
        layer_groups: Sequence[int],
        impl: str,
        sharding: NamedSharding,
        query_axes: tuple[str, ...] | None = None,
    ):
        self._layers = list(cache.layers)
        self._token_ids = cache.token_ids
        self._batches = batches
        self._slots = slot_mapping
        self._layer_groups = layer_groups
        self._impl = impl
        self._sharding = sharding
        self._query_axes = query_axes

    @property
    def cache(self) -> KVCache:
        return KVCache(tuple(self._layers), self._token_ids)

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"] | None,
        *,
        scale: float,
        sliding_window: int | None,
        logit_softcap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "T N H"]:
        group = self._layer_groups[layer]
        store_and_attend = partial(
            _store_and_attend,
            scale=scale,
            sliding_window=sliding_window,
            logit_softcap=logit_softcap,
            impl=self._impl,
        )
        if self._sharding.mesh.size > 1:
            store_and_attend = self._on_own_heads(store_and_attend)
        out, self._layers[layer] = store_and_attend(
            (q, k, v), self._layers[layer], self._slots[group], self._batches[group], sinks
        )
        return out

    def write_and_attend(
        self,
        layer: int,
        qkv: Float[Array, "T K G_plus_2 H"],
        rope: RopeTable | None,
        **options: Any,
    ) -> Float[Array, "T N H"]:
        """Do the same for heads that are neither normed nor rotated, in one kernel.

        Args:
            layer: Index.
            qkv: Behind the queries of each KV head its key and value.
            rope: The layer's positions, None for none.
            options: Of `jaxinfer.cpu_kernels.write_and_attend`.
        """
        group = self._layer_groups[layer]
        pages = self._layers[layer]
        out, k_pages, v_pages = cpu_kernels.write_and_attend(
            qkv,
            pages.k_pages,
            pages.v_pages,
            self._batches[group],
            self._slots[group],
            cos=None if rope is None else rope.cos[:, 0],
            sin=None if rope is None else rope.sin[:, 0],
            interleaved=rope is not None and rope.interleaved,
            **options,
        )
        self._layers[layer] = pages._replace(k_pages=k_pages, v_pages=v_pages)
        return out

    def weights(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        tokens: Int[Array, " C"] | None,
        num_keys: int | None,
        **how: Any,
    ) -> Float[Array, "C N S"]:
        """Return what `jaxinfer.nn.attention.AttendWithWeights` promises."""
        batch = self._batches[self._layer_groups[layer]]
        return paged_weights(q, self._layers[layer], batch, tokens, num_keys, **how)

    def _on_own_heads(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let each device run the function on the heads that it holds."""
        pages, whole = PartitionSpec(None, self._sharding.spec[1]), PartitionSpec()
        queries = PartitionSpec(None, self._query_axes)
        return jax.shard_map(
            function,
            mesh=self._sharding.mesh,
            in_specs=(
                (queries, pages, pages),
                pages,
                whole,
                whole,
                PartitionSpec(self._query_axes),
            ),
            out_specs=(queries, pages),
            # A kernel does not tell which of its results differ from device to device.
            check_vma=False,
        )


def _store_and_attend(
    new: tuple[Array, Array, Array | None],
    pages: KVPages,
    slot_mapping: Array,
    batch: RaggedBatch,
    sinks: Array | None,
    *,
    impl: str,
    **how: Any,
) -> tuple[Array, KVPages]:
    """Return what the queries gather, and the pages with the new keys and values in them."""
    q, k, v = new
    if impl == "cpu":
        pages = write_kv(k, v, pages, slot_mapping, impl="xla")
        v_pages = pages.k_pages if pages.v_pages is None else pages.v_pages
        out = cpu_kernels.paged_attention(q, pages.k_pages, v_pages, batch, sinks=sinks, **how)
        return out, pages
    pages = write_kv(k, v, pages, slot_mapping, impl=impl)
    k_pages, v_pages, k_scales, v_scales = pages
    if v_pages is None:
        v_pages, v_scales = k_pages, k_scales
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    out = paged_attention(q, k_pages, v_pages, batch, sinks=sinks, impl=impl, **scales, **how)
    return out, pages
