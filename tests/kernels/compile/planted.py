"""Cases with something wrong: the checks must see it."""

from __future__ import annotations

import os
import threading
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.aot import Case, Program
from pallas_kernels.aot.matrix import PREFILL, abstract_batch, abstract_pages
from pallas_kernels.tiles import PrefillTiles
from pallas_kernels.triton.prefill import paged_prefill


def cases() -> list[Case]:
    one = {"chips": ("a100",)}
    return [
        Case(name="spills", build=partial(_prefill, 128, 64, 4), kernels=(PREFILL,), **one),
        Case(name="too much shared memory", build=partial(_prefill, 64, 256, 8), chips=("l4",)),
        Case(name="dies", build=_die, **one),
        Case(name="hangs", build=_hang, **one),
        Case(name="harmless", build=_harmless, **one),
    ]


def _prefill(block_q: int, block_k: int, num_warps: int, _: Mesh) -> Program:
    pages = abstract_pages("bfloat16", 4, 128)
    q = jax.ShapeDtypeStruct((512, 16, 128), jnp.bfloat16)
    tiles = PrefillTiles(block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=4)
    function = partial(paged_prefill, scale=1.0, tiles=tiles)
    return Program(function, (q, pages.k_pages, pages.v_pages, abstract_batch()))


def _die(_: Mesh) -> Program:
    os.write(2, b"LLVM ERROR: planted\n")
    os.abort()


def _hang(_: Mesh) -> Program:
    threading.Event().wait()
    raise AssertionError("nobody sets the event")


def _harmless(_: Mesh) -> Program:
    return Program(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), jnp.float32),))
