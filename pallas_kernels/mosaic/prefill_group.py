"""A computing warpgroup of prefill: its queries, its turns, its softmax and its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import softmax
from pallas_kernels.mosaic.interpret import accumulate
from pallas_kernels.mosaic.prefill_tile import PrefillShape, Tile
from pallas_kernels.mosaic.ring import Ring, swizzle_bytes
from pallas_kernels.mosaic.softmax import ROWS, TILE, Running
from pallas_kernels.mosaic.versions import store_unswizzled
from pallas_kernels.shapes import Array

MOST_UNMASKED = 192
"""Head dims above this mask every step: the bounds of three loops would be spilled beside an
accumulator of 128 registers, and per product of so many columns a mask costs little."""


@dataclass(frozen=True)
class ComputingGroup:
    """One computing warpgroup. Its rows are head-major: row r is head r // n, token r % n of n.

    Attributes:
        shape: Static sizes.
        tile: The tile.
        ring: Where keys and values arrive.
        wg: Its number, 0 or 1.
        heads: Its heads are `heads_per_tile` from this many times `heads_per_tile` on.
        scratch: The kernel's scratch.
    """

    shape: PrefillShape
    tile: Tile
    ring: Ring
    wg: Array
    heads: Array
    scratch: dict[str, Any]

    @property
    def first_token(self) -> Array:
        return self.wg * self.shape.group_tokens

    @cached_property
    def distance(self) -> Array:
        """Position of its first token, counted from the first key of step 0."""
        return self.tile.position + self.first_token - self.tile.first_key

    @cached_property
    def num_keys(self) -> Array:
        """Keys of the row, counted from there."""
        return self.tile.seq_len - self.tile.first_key

    @property
    def head_ids(self) -> list[Array]:
        first = self.heads * self.shape.heads_per_tile
        return [first + i for i in range(self.shape.heads_per_tile)]

    def load_queries(self, q_ref) -> None:
        queries, barrier = self.scratch["qo"][0].at[self.wg], self.scratch["q_full"].at[self.wg]
        n = self.shape.group_tokens
        # Some of the tokens may belong to other rows; behind T, TMA fills in zeros.
        tokens = pl.ds(self.tile.first_token + self.first_token, n)
        for i, head in enumerate(self.head_ids):
            source = q_ref.at[tokens, head]
            plgpu.copy_gmem_to_smem(source, queries.at[i * n : (i + 1) * n], barrier)
        plgpu.barrier_wait(barrier)

    def attend(self) -> Running:
        """Return the softmax over all keys."""
        tile = self.tile
        _ = self.distance, self.num_keys  # outside of the loops
        # Taking turns: at each meeting one warpgroup has issued its products and goes on to its
        # exponentials, for the other it is the reverse. Warpgroup 0 is one meeting ahead.
        pl.when(self.wg == 1)(self.ring.meet)
        state = softmax.start(self.shape.head_dim)
        step = lambda masked: lambda i, state: self.step(i, state, masked=masked)  # noqa: E731
        if self.shape.head_dim > MOST_UNMASKED:
            state = lax.fori_loop(jnp.int32(0), tile.num_steps, step(True), state)
        else:
            if self.shape.sliding_window is not None:
                state = lax.fori_loop(jnp.int32(0), tile.full_start, step(True), state)
            state = lax.fori_loop(tile.full_start, tile.full_end, step(False), state)
            state = lax.fori_loop(tile.full_end, tile.num_steps, step(True), state)
        pl.when(self.wg == 0)(self.ring.meet)
        return state

    def step(self, step: Array, state: Running, *, masked: bool) -> Running:
        ring, rule = self.ring, self.shape.rule
        slot = ring.slot(step)
        queries = self.scratch["qo"][0].at[self.wg]
        ring.wait_full("k", step)
        if masked:
            # Here and not before their product, since scores and weights take no registers yet.
            ring.wait_full("v", step)
            self.clear_unused_values(step)

        def multiply(products_ref):
            plgpu.wgmma(products_ref, queries, ring.k.at[slot].transpose((1, 0)))
            self.ring.meet()
            return products_ref[...]

        products = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.shape.tiles.block_k), jnp.float32))
        ring.release("k", step)
        scores = rule.capped(products)
        if masked:
            scores = jnp.where(self.seen(step, scores.shape), scores, softmax.MASKED)
        state, weights = softmax.see(state, scores, rule.log2_scale)
        weights = weights.astype(self.shape.dtype)
        self.ring.meet()
        if not masked:
            ring.wait_full("v", step)
        acc = accumulate(state.acc, weights, ring.v.at[slot], interpret=self.shape.interpret)
        ring.release("v", step)
        return state._replace(acc=acc)

    def seen(self, step: Array, shape: tuple[int, ...]) -> Array:
        """Return which keys of a block each row sees."""
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
        token &= self.shape.group_tokens - 1
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        # Differences of keys and tokens would be the same in all steps, and be kept in registers.
        key += step * self.shape.tiles.block_k - self.distance
        if self.shape.sliding_window is None:
            return key <= token
        # 0 <= token - key < window, as one comparison: a later key is a huge unsigned number.
        return (token - key).astype(jnp.uint32) < self.shape.sliding_window

    def clear_unused_values(self, step: Array) -> None:
        """Zero the block's slots behind the row's last key.

        Warpgroup 0 does it for both. It is one turn ahead: warpgroup 1 multiplies these values only
        after meetings that warpgroup 0 comes to later than here.
        """
        used = self.num_keys - step * self.shape.tiles.block_k

        @pl.when((self.wg == 0) & (used < self.shape.tiles.block_k))
        def _():
            H, dtype = self.shape.head_dim, self.shape.dtype
            columns = swizzle_bytes(H, dtype) // jnp.dtype(dtype).itemsize
            values = self.ring.v.at[self.ring.slot(step)]
            softmax.clear_values_from(values, used, head_dim=H, columns=columns)

    def store(self, out: Array, out_ref) -> None:
        """Write the rows of the tile's tokens, and no others."""
        n, tile = self.shape.group_tokens, self.tile
        whole_tile, single_rows = (ref.at[self.wg] for ref in self.scratch["qo"])
        first = tile.first_token + self.first_token
        out = out.astype(self.shape.dtype)
        is_whole = (tile.start == 0) & (tile.stop == self.shape.tile_tokens)

        @pl.when(is_whole)
        def _():
            whole_tile[...] = out
            plgpu.commit_smem()
            for i, head in enumerate(self.head_ids):
                target = out_ref.at[pl.ds(first, n), head]
                plgpu.copy_smem_to_gmem(whole_tile.at[i * n : (i + 1) * n], target)

        @pl.when(~is_whole)
        def _():
            # The layouts overlap: the other warpgroup must have read its queries.
            self.ring.meet()
            store_unswizzled(single_rows, out)
            plgpu.commit_smem()
            start, stop = (
                jnp.clip(edge - self.first_token, 0, n) for edge in (tile.start, tile.stop)
            )
            count = stop - start
            # A copy has a fixed size: one for each power of two in the count.
            for size in (2**i for i in range(n.bit_length() - 1, -1, -1)):

                @pl.when((count & size) != 0)
                def _(size=size):
                    token = start + (count & -(2 * size))
                    for i, head in enumerate(self.head_ids):
                        target = out_ref.at[pl.ds(first + token, size), head]
                        source = single_rows.at[pl.ds(i * n + token, size)]
                        plgpu.copy_smem_to_gmem(source, target)

        plgpu.wait_smem_to_gmem(0)
