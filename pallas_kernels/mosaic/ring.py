"""The ring of key and value blocks in shared memory, and all barriers between warpgroups.

Knows stages, slots and barriers; knows nothing of pages or attention. One producer warpgroup fills
slots by TMA, the consumer warpgroups empty them:

    producer   wait_free ─ TMA into the slot ─┐                ┌─ wait_free …
    barrier                                 full             free
    consumers                                 └─ wait_full ─ wgmma ─ release ─┘

Keys and values have slots and barriers of their own, so that a slot of keys is refilled while the
values of the same step are still being multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shapes import Array

Kind = Literal["k", "v"]


@dataclass(frozen=True)
class Ring:
    """The references of a ring, inside a kernel.

    Every method is called by whole warpgroups: `wait_free` and `drain` by the producer, `wait_full`
    and `release` by each consumer, all of them once per step and kind.

    Attributes:
        stages: Slots of each kind.
        k: [stages, block_k, H] in shared memory; the slot of step j is j % stages.
        v: The same for values.
        full: By kind, a barrier per slot that completes when all copies into it have landed.
        free: By kind, a barrier per slot that completes when all consumers have left it.
        meeting: A barrier that completes when all consumers have come to it; None for one consumer.
    """

    stages: int
    k: Any
    v: Any
    full: dict[Kind, Any]
    free: dict[Kind, Any]
    meeting: Any

    def slot(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.stages))

    def wait_free(self, kind: Kind, step: Array) -> None:
        """Wait until the consumers have left the block that stood in this step's slot before."""

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.free[kind].at[self.slot(step)])

    def wait_full(self, kind: Kind, step: Array) -> None:
        """Wait until the block of this step has landed."""
        plgpu.barrier_wait(self.full[kind].at[self.slot(step)])

    def release(self, kind: Kind, step: Array) -> None:
        """Say that this warpgroup no longer reads the block of this step."""
        plgpu.barrier_arrive(self.free[kind].at[self.slot(step)])

    def meet(self) -> None:
        """Wait for the other consumer to come here, too."""
        plgpu.barrier_arrive(self.meeting)
        plgpu.barrier_wait(self.meeting)

    def drain(self, num_steps: Array) -> None:
        """Wait for the slots still in use, so that no completion of a barrier goes unobserved."""

        @pl.loop(jnp.maximum(num_steps - self.stages, 0), num_steps)
        def _(step):
            for kind in self.free:
                plgpu.barrier_wait(self.free[kind].at[self.slot(step)])


def ring_scratch(
    shape: tuple[int, int, int], dtype: Any, *, copies: int, consumers: int
) -> dict[str, Any]:
    """Return the scratch that `make_ring` takes.

    Args:
        shape: (stages, block_k, H).
        dtype: Of keys and values.
        copies: TMA copies that fill one slot.
        consumers: Warpgroups that read it.
    """
    stages = shape[0]
    tile = plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    scratch = {"k_ring": tile, "v_ring": tile}
    scratch |= {"k_full": full, "v_full": full, "k_free": free, "v_free": free}
    if consumers > 1:
        scratch["meeting"] = plgpu.Barrier(num_arrivals=consumers)
    return scratch


def make_ring(ring_type: type[Ring], stages: int, refs: dict[str, Any]) -> Ring:
    """Return the ring over the references that a kernel was given for `ring_scratch`."""
    return ring_type(
        stages,
        refs["k_ring"],
        refs["v_ring"],
        {"k": refs["k_full"], "v": refs["v_full"]},
        {"k": refs["k_free"], "v": refs["v_free"]},
        refs.get("meeting"),
    )


def swizzle_bytes(head_dim: int, dtype: Any) -> int:
    """Return the widest swizzle whose rows divide a row of a head: 128, 64 or 32 bytes, else 0."""
    row = head_dim * jnp.dtype(dtype).itemsize
    return next((swizzle for swizzle in (128, 64, 32) if row % swizzle == 0), 0)


def swizzled(head_dim: int, dtype: Any) -> Sequence[Any]:
    """Return the layout of a [rows, H] tile that both TMA and wgmma know."""
    swizzle = swizzle_bytes(head_dim, dtype)
    columns = swizzle // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
