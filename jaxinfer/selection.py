"""Order statistics and draws, row by row, without sorting: arrays in, arrays out, no parameters.

A vocabulary of 50,000 to 260,000 is too long to sort at every step (XLA:CPU takes tens of
milliseconds a batch), and nothing a sampler asks for needs it sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.shapes import Array, Float, Int


@dataclass(frozen=True)
class Shards:
    """How the last axis of logits is divided among devices.

    XLA divides everything that is done to logits but `top_k`, for which it would gather them.

    Attributes:
        mesh: The devices.
        axes: Mesh axes over which the last axis is divided, evenly.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many parts there are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def run(self, function: Callable[[Array], tuple[Array, ...]], x: Array) -> tuple[Array, ...]:
        """Return what each device makes of its part of `x` [B, V], side by side."""
        spec = PartitionSpec(None, self.axes)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(x)


def highest(x: Float[Array, "B V"]) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Return each row's largest value, +inf if the row holds a NaN, and the first index of it."""
    V = x.shape[-1]
    peak = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=-1)
    # Two plain reductions: XLA:CPU runs jnp.argmax, a reduction of pairs, 8 times slower (3.6 ms
    # against 0.43 for [16, 49152] on two Zen 4 cores).
    index = jnp.min(jnp.where(x == peak[:, None], _iota(x), V), axis=-1)
    return peak, jnp.minimum(index, V - 1)


def top_values(x: Float[Array, "B V"], K: int, shards: Shards | None = None) -> Float[Array, "B K"]:
    """Return the `K` largest of each row of `x` [B, V], descending.

    With V divided among devices, the largest of each device compete.

    Takes them from the K of V / 32 columns with the largest maxima, which hold them all; at
    [16, 49152] that is 3 times faster on a CPU than `lax.top_k` over the row.
    """
    B, V = x.shape
    if shards is not None:
        most = min(K, V // shards.count)
        x = shards.run(lambda own: (top_values(own, most),), x)[0]
        V = x.shape[1]
    columns = -(-V // 32)
    if columns > K:
        x = jnp.pad(x, ((0, 0), (0, columns * 32 - V)), constant_values=-jnp.inf)
        x = x.reshape(B, 32, columns)
        _, best = lax.top_k(jnp.max(x, axis=1), K)  # [B, K]
        x = jnp.take_along_axis(x, best[:, None], axis=2).reshape(B, 32 * K)
    # A caller's slice of the result, merged with top_k's own, would hide the pattern by which XLA
    # knows a top-k, and leave a full sort: 10 ms instead of 0.6 at B = 16.
    return lax.optimization_barrier(lax.top_k(x, K)[0])


def top_entries(
    x: Float[Array, "B V"], K: int, shards: Shards | None = None
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Return the `K` largest of each row, descending, and where they are: `lax.top_k`.

    With V divided among devices, the largest of each device compete.
    """
    if shards is None:
        return lax.top_k(x, K)
    width = x.shape[1] // shards.count

    def of_device(own: Array) -> tuple[Array, Array]:
        values, places = lax.top_k(own, min(K, width))
        return values, places + lax.axis_index(shards.axes).astype(places.dtype) * width

    values, places = shards.run(of_device, x)
    # Ties are in the order of their indices still: first those of the first device.
    top, best = lax.top_k(values, K)
    return top, jnp.take_along_axis(places, best, axis=-1)


def bisect(
    reaches: Callable[[Array], Array], *, low: Float[Array, " B"], high: Float[Array, " B"]
) -> Float[Array, " B"]:
    """Return, for each row, the largest float32 in [low, high] that `reaches`.

    Bisects the floats' order-preserving integer keys: exact, and at most 32 trips. `reaches` holds
    at `low` and, once false, stays false. Rows with `low == high` cost and change nothing. Where a
    device treats subnormals as zeros, one may stand for 0.
    """

    def flip(bits: Array) -> Array:  # float bits ↔ keys that compare like the floats
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    def trip(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        lo, hi = bounds
        mid = (lo & hi) + ((lo ^ hi) >> 1)  # their mean, without overflow
        good = reaches(lax.bitcast_convert_type(flip(mid), jnp.float32))
        return jnp.where(good, mid, lo), jnp.where(good, hi, mid)

    lo, hi = (flip(lax.bitcast_convert_type(x, jnp.int32)) for x in (low, high))
    lo, _ = lax.while_loop(lambda b: jnp.any(b[0] + 1 < b[1]), trip, (lo, hi + 1))
    return lax.bitcast_convert_type(flip(lo), jnp.float32)


def race(weights: Float[Array, "B V"], keys: Array) -> Int[Array, " B"]:
    """Return, for each row, an index drawn with probability proportional to its weight.

    Every entry runs for an exponentially distributed time, divided by its weight; the first one in
    wins (Gumbel-max by another name). An entry's time depends on the row's key and on its index
    only, not on B, V or its neighbours; so a weight that changes in its last bits, as it does from
    one batch shape to another, matters only if two times are that close: about one draw in
    100,000. An inverted CDF needs one random number a row but sums the whole vocabulary, and of
    2,000 draws 8 changed under the same noise, neighbouring tail tokens taking each other's place.

    Args:
        weights: Not negative, and the largest of each row is 1. Weight 0 is never drawn.
        keys: [B] random keys.
    """
    V = weights.shape[-1]
    # Bit v is then a function of key and v alone, whatever the process's default.
    with jax.threefry_partitionable(True):
        bits = jax.vmap(lambda key: jax.random.bits(key, (V,), jnp.uint32))(keys)
    # All 32 bits count: what is drawn from the tail depends on the smallest times.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2**-32, 1 - 2**-24)
    _, index = highest(jnp.log1p(-u) / weights)
    return index


def take(x: Array, index: Int[Array, " B"]) -> Array:
    """Return x[b, index[b]] for each row b."""
    return jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]


def _iota(x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
