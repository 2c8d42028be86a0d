"""Self-attention over the paged cache."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from flax import nnx

from jaxinfer.nn.linear import Linear
from jaxinfer.nn.rope import RopeTable, apply_rope
from pallas_kernels.shapes import Array, Float


@runtime_checkable
@runtime_checkable
class Attend(Protocol):
    """The cache seam: stores a layer's new keys and values, and attends to all of the row's.

    The model is handed one of these; it never sees pages. Serving uses
    `jaxinfer.kv_cache.PagedAttend`.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Float[Array, "T N H"]: ...


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions.

    Query, key and value are one product with output [K, G + 2, H]: each KV head stands behind the G
    queries that use it, so a shard of K is whole.
    """

    def __init__(
        self,
        layer: int,
        hidden: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        output_bias: bool,
        sliding_window: int | None,
        dtype: Any,
    ):
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.sliding_window = sliding_window
        group = num_heads // num_kv_heads
        self.qkv = Linear(
            hidden,
            (num_kv_heads, group + 2, head_dim),
            dtype=dtype,
            axes=("embed", "kv_heads", None, None),
            bias=qkv_bias,
        )
        self.output = Linear(
            num_heads * head_dim, (hidden,), dtype=dtype, axes=("heads", "embed"), bias=output_bias
        )

    def __call__(
        self, x: Float[Array, "T D"], rope: RopeTable, attend: Attend
    ) -> Float[Array, "T D"]:
        T, _ = x.shape
        N, H = self.num_heads, self.head_dim
        qkv = self.qkv(x)  # [T, K, G + 2, H]
        q = qkv[:, :, :-2].reshape(T, N, H)
        k, v = qkv[:, :, -2], qkv[:, :, -1]  # [T, K, H] each
        out = attend(
            self.layer,
            apply_rope(q, rope),
            apply_rope(k, rope),
            v,
            scale=H**-0.5,
            sliding_window=self.sliding_window,
        )
        return self.output(out.reshape(T, N * H))
