"""Cases: what `benchmarks/gpu.py` times, in its real shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.gpu import Sizes
from benchmarks.gpu_attention import attend_paged, decode_batch, prefill_batch
from benchmarks.gpu_timing import chained
from pallas_kernels.aot import Case, Program

SIZES = Sizes()


def cases() -> list[Case]:
    """The largest and the smallest of each."""
    decode = [(pick(SIZES.batches), pick(SIZES.contexts)) for pick in (min, max)]
    prefill = [min(SIZES.prefills), max(SIZES.prefills)]
    made = [
        _case(
            f"decode {batch} x {context}", batch, partial(decode_batch, SIZES.heads, batch, context)
        )
        for batch, context in decode
    ]
    made += [
        _case(f"prefill {n} of {context}", n, partial(prefill_batch, SIZES.heads, n, context))
        for n, context in prefill
    ]
    return made


def _case(name: str, tokens: int, make_batch: Any) -> Case:
    def build(_: Mesh) -> Program:
        heads = SIZES.heads
        batch = jax.eval_shape(make_batch)
        num_pages = SIZES.pool_bytes // (heads.token_bytes * heads.page_size)
        shape = (num_pages, heads.num_kv_heads, heads.page_size, heads.head_dim)
        pages = (jax.ShapeDtypeStruct(shape, jnp.bfloat16),) * 2
        q = jax.ShapeDtypeStruct((tokens, heads.num_heads, heads.head_dim), jnp.bfloat16)
        tables = jax.ShapeDtypeStruct((2, *batch.page_table.shape), jnp.int32)
        program = chained(partial(attend_paged, "pallas", heads), 2)
        return Program(program, (q, pages, batch, tables))

    kernels = ("paged_decode", "paged_prefill")
    return Case(name=name, build=build, kernels=kernels, chips=("h100",))
