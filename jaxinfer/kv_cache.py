"""The paged cache on the device: its layout, its size, and how a layer reads and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer import cpu_kernels
from jaxinfer.nn.rope import RopeTable
from pallas_kernels import RaggedBatch, paged_attention, slot_coordinates
from pallas_kernels.shapes import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys, values and token ids by page.

    One array per layer and kind: XLA then updates each in place. (One stacked array passed through
    a scan as input and output is copied whole every step.) Heads stand before slots, so that a
    page of one head is one contiguous tile.

    Attributes:
        keys: L arrays [num_pages, K, page_size, H], with as many pages as the layer's group has.
        values: The same; none where keys are the values too.
        token_ids: int32 [num_pages, page_size], of the full group. What each slot holds; lets the
            sampler look up a sequence's history without shipping it from the host.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
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
        dtype: Of keys and values.
        has_values: False where keys are the values too (latent attention).
    """

    layer_groups: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: Any
    has_values: bool = True

    def page_bytes(self, group: int) -> int:
        """Bytes of one page over all layers of a group, token ids included."""
        num_layers = self.layer_groups.count(group)
        per_token = (1 + self.has_values) * num_layers * self.num_kv_heads * self.head_dim
        id_bytes = 0 if group else 4
        return self.page_size * (per_token * jnp.dtype(self.dtype).itemsize + id_bytes)


def make_cache(shape: CacheShape, num_pages: Sequence[int], shardings: tuple[Any, Any]) -> KVCache:
    """Allocate zeroed pages, so many for each group.

    Args:
        shape: What a page holds.
        num_pages: By group.
        shardings: Those of keys/values and of token ids.
    """
    kv_sharding, ids_sharding = shardings
    page = (shape.num_kv_heads, shape.page_size, shape.head_dim)

    def pages() -> tuple[Array, ...]:
        return tuple(
            jnp.zeros((num_pages[group], *page), shape.dtype, device=kv_sharding)
            for group in shape.layer_groups
        )

    ids = jnp.zeros((num_pages[0], shape.page_size), jnp.int32, device=ids_sharding)
    return KVCache(keys=pages(), values=pages() if shape.has_values else (), token_ids=ids)


def write_token_ids(
    cache: KVCache, token_ids: Int[Array, " T"], slot_mapping: Int[Array, " T"]
) -> KVCache:
    """Note which token each slot holds; slots outside the pool are dropped."""
    pages, offsets = slot_coordinates(slot_mapping, cache.page_size)
    ids = cache.token_ids.at[pages, offsets].set(token_ids, mode="drop")
    return KVCache(cache.keys, cache.values, ids)


class PagedAttend:
    """`jaxinfer.nn.attention.Attend` over a `KVCache`, for one trace of one step.

    Holds the functional cache while the layers run; `cache` is what to return from the step.

    Args:
        cache: The pages.
        batches: The rows and their page tables, by group.
        slot_mapping: Where each token is written, by group.
        layer_groups: Each layer's group.
        impl: "cpu" for the C++ kernel; else see `pallas_kernels.paged_attention`.
    """

    def __init__(
        self,
        cache: KVCache,
        batches: Sequence[RaggedBatch],
        slot_mapping: Int[Array, "num_groups T"],
        *,
        layer_groups: Sequence[int],
        impl: str,
    ):
        self._keys, self._values = list(cache.keys), list(cache.values)
        self._token_ids = cache.token_ids
        self._batches = batches
        self._slot_mapping = slot_mapping
        self._slots = [slot_coordinates(slots, cache.page_size) for slots in slot_mapping]
        self._layer_groups = layer_groups
        self._impl = impl

    @property
    def cache(self) -> KVCache:
        return KVCache(tuple(self._keys), tuple(self._values), self._token_ids)

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
        pages, offsets = self._slots[group]
        # Padding tokens carry a slot behind the last page, which "drop" ignores.
        self._keys[layer] = self._keys[layer].at[pages, :, offsets].set(k, mode="drop")
        if v is not None:
            self._values[layer] = self._values[layer].at[pages, :, offsets].set(v, mode="drop")
        attend = partial(paged_attention, impl=self._impl)
        if self._impl == "cpu":
            attend = cpu_kernels.paged_attention
        return attend(
            q,
            self._keys[layer],
            self._keys[layer] if v is None else self._values[layer],
            self._batches[group],
            scale=scale,
            sliding_window=sliding_window,
            logit_softcap=logit_softcap,
            sinks=sinks,
        )

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
        out, self._keys[layer], self._values[layer] = cpu_kernels.write_and_attend(
            qkv,
            self._keys[layer],
            self._values[layer],
            self._batches[group],
            self._slot_mapping[group],
            cos=None if rope is None else rope.cos[:, 0],
            sin=None if rope is None else rope.sin[:, 0],
            interleaved=rope is not None and rope.interleaved,
            **options,
        )
        return out
