"""Steps with something wrong: the checks of whole steps must see it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.kv_cache import KVCache
from pallas_kernels import KVPages, paged_attention, write_kv
from pallas_kernels.aot import Case, Program
from pallas_kernels.aot.matrix import abstract_batch
from tests.kernels.compile.whole_steps import (
    NUM_LAYERS,
    SETUPS,
    TOKENS,
    Step,
    abstract_programs,
    facts,
    placed,
)

ONE, EIGHT = SETUPS


def cases() -> list[Case]:
    chips = ("h100",)
    return [
        Case(name="not donated", build=_not_donated, chips=chips),
        Case(name="cache through a scan", build=_scanned, chips=chips),
        Case(name="weights everywhere", build=_whole_weights, chips=chips, num_devices=8),
    ]


def _not_donated(mesh: Mesh) -> Program:
    programs, cache = abstract_programs(ONE, mesh)
    layout = programs.config.layout(TOKENS["decode"])
    # The step itself, jitted as `StepPrograms` does but for the donation.
    step = jax.jit(partial(programs.backbone_step, layout))
    whole = NamedSharding(mesh, PartitionSpec())
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=whole)
    sampled = jax.ShapeDtypeStruct((layout.max_num_seqs,), jnp.int32, sharding=whole)
    args = (programs.backbone.abstract, cache, packed, sampled)
    return Program(step, args, lambda compiled: facts(compiled, programs, cache))


def _scanned(mesh: Mesh) -> Program:
    """Attention of each layer, with the pages as the input and the output of a scan."""
    programs, cache = abstract_programs(ONE, mesh)
    T, N, K, H = TOKENS["decode"], 32, 8, 128

    def step(pages: KVPages, q: Any, k: Any, slots: Any, batch: Any) -> tuple[Any, KVPages]:
        def layer(q: Any, pages: KVPages) -> tuple[Any, KVPages]:
            pages = write_kv(k, k, pages, slots, impl="pallas")
            out = paged_attention(q, pages.k_pages, pages.v_pages, batch, scale=1.0, impl="pallas")
            return out, pages

        return jax.lax.scan(layer, q, pages)

    layers = [cache.layers[0]] * NUM_LAYERS
    stacked = jax.tree.map(
        lambda *x: jax.ShapeDtypeStruct((len(x), *x[0].shape), x[0].dtype), *layers
    )
    q, k = (jax.ShapeDtypeStruct((T, heads, H), jnp.bfloat16) for heads in (N, K))
    slots = jax.ShapeDtypeStruct((T,), jnp.int32)
    args = placed((stacked, q, k, slots, abstract_batch()), NamedSharding(mesh, PartitionSpec()))
    return Program(
        jax.jit(step, donate_argnums=0),
        args,
        lambda compiled: facts(compiled, programs, KVCache(args[0], cache.token_ids)),
    )


def _whole_weights(mesh: Mesh) -> Program:
    """One of the projections stands whole on each device."""

    def shard(path: str, sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec()) if "mlp" in path else sharding

    programs, cache = abstract_programs(EIGHT, mesh, shard=shard)
    step = Step(programs, TOKENS["decode"])
    return Program(step, (), lambda compiled: facts(compiled, programs, cache))
