"""Norm, rotation, writing and attention in one kernel, against the same done one by one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import cpu_kernels
from jaxinfer.forward_batch import one_token_rows
from jaxinfer.nn import Norm, NormConfig, RopeConfig, RopeTable, apply_rope
from pallas_kernels import RaggedBatch, paged_attention, slot_coordinates
from tests.kernels.cpu import CPU_ISAS, isa_or_skip

PAGE_SIZE, NUM_PAGES, MAX_PAGES = 16, 96, 80


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: `rows` lists (new tokens, keys in all) of each row, one-token rows first."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 32
    interleaved: bool = False
    norms: bool = False
    sliding_window: int | None = None
    sinks: bool = False
    dtype: str = "float32"


CASES = {
    "decode": Case(((1, 7), (1, 64), (1, 65), (1, 1))),
    "chunks": Case(((5, 5), (70, 90), (33, 200))),
    "both": Case(((1, 30), (1, 129), (40, 40))),
    "a row that threads share": Case(((1, 1200), (1, 3))),
    "a shared row beside a chunk": Case(((1, 700), (20, 60)), sinks=True),
    "partial interleaved rotation": Case(((1, 30), (9, 20)), rotary_dim=12, interleaved=True),
    "no rotation": Case(((1, 30), (9, 20)), rotary_dim=0),
    "norms": Case(((1, 30), (9, 20)), norms=True),
    "window": Case(((1, 100), (1, 620), (40, 90)), sliding_window=23),
    "sinks": Case(((1, 100), (40, 90)), sinks=True),
    "one KV head for many": Case(((1, 100), (40, 90)), num_heads=7, num_kv_heads=1, head_dim=80),
    "bfloat16": Case(((1, 100), (40, 90)), dtype="bfloat16"),
}


def step(case: Case) -> tuple[dict, RaggedBatch]:
    """Return the kernel's arguments. Pages of nobody and slots not yet written hold NaN."""
    rng = np.random.default_rng(0)
    K, H, N = case.num_kv_heads, case.head_dim, case.num_heads
    T, B = sum(n for n, _ in case.rows) + 3, len(case.rows) + 1
    pages = np.full((2, NUM_PAGES, K, PAGE_SIZE, H), np.nan)
    table = np.full((B, MAX_PAGES), -1, np.int32)
    free = iter(rng.permutation(NUM_PAGES))
    slots = np.full(T, NUM_PAGES * PAGE_SIZE, np.int32)
    positions = np.full(T, -1, np.int32)
    starts = np.zeros(B + 1, np.int32)
    for i, (new, keys) in enumerate(case.rows):
        used = -(-keys // PAGE_SIZE)
        table[i, :used] = [next(free) for _ in range(used)]
        s = np.arange(keys)
        page, offset = table[i, s // PAGE_SIZE], s % PAGE_SIZE
        old = slice(0, keys - new)
        pages[:, page[old], :, offset[old]] = rng.normal(size=(keys - new, 2, K, H))
        span = slice(starts[i], starts[i] + new)
        slots[span] = (page * PAGE_SIZE + offset)[keys - new :]
        positions[span] = s[keys - new :]
        starts[i + 1 :] = starts[i] + new
    arrays = {
        "qkv": jnp.asarray(rng.normal(size=(T, K, N // K + 2, H)), case.dtype),
        "k_pages": jnp.asarray(pages[0], case.dtype),
        "v_pages": jnp.asarray(pages[1], case.dtype),
        "slot_mapping": jnp.asarray(slots),
        "positions": jnp.asarray(positions),
        "q_norm": jnp.asarray(rng.normal(size=H), jnp.float32) if case.norms else None,
        "k_norm": jnp.asarray(rng.normal(size=H), jnp.float32) if case.norms else None,
        "sinks": jnp.asarray(rng.normal(size=N), jnp.float32) if case.sinks else None,
    }
    batch = RaggedBatch(
        page_table=jnp.asarray(table),
        seq_lens=jnp.asarray([keys for _, keys in case.rows] + [0], jnp.int32),
        query_start_loc=jnp.asarray(starts),
        num_decode_rows=jnp.int32(sum(n == 1 for n, _ in case.rows)),
        num_rows=jnp.int32(len(case.rows)),
    )
    return arrays, batch


def rope_of(case: Case, positions: jax.Array) -> RopeTable | None:
    if not case.rotary_dim:
        return None
    config = RopeConfig(rotary_dim=case.rotary_dim, interleaved=case.interleaved)
    return RopeTable.at(positions, config)


def one_by_one(case: Case, arrays: dict, batch: RaggedBatch) -> tuple[jax.Array, ...]:
    qkv = arrays["qkv"].astype(jnp.float32)
    T, K, _, H = qkv.shape
    q = qkv[:, :, :-2].reshape(T, -1, H)
    k, v = qkv[:, :, -2], qkv[:, :, -1]

    def normed(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return x
        norm = Norm((H,), NormConfig(eps=1e-5), dtype=jnp.float32)
        norm.scale[...] = scale
        return norm(x)

    q, k = normed(q, arrays["q_norm"]), normed(k, arrays["k_norm"])
    rope = rope_of(case, arrays["positions"])
    if rope is not None:
        q, k = apply_rope(q, rope), apply_rope(k, rope)
    pages, offsets = slot_coordinates(arrays["slot_mapping"], PAGE_SIZE)

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[pages, :, offsets].set(new.astype(old.dtype), mode="drop")

    k_pages, v_pages = written(arrays["k_pages"], k), written(arrays["v_pages"], v)
    out = paged_attention(
        q.astype(arrays["qkv"].dtype),
        k_pages,
        v_pages,
        batch,
        scale=H**-0.5,
        sliding_window=case.sliding_window,
        sinks=arrays["sinks"],
    )
    return out, k_pages, v_pages


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize("name", CASES)
def test_one_call_equals_the_steps(isa: str, name: str) -> None:
    case = CASES[name]
    arrays, batch = step(case)
    expected = one_by_one(case, arrays, batch)
    positions = arrays.pop("positions")
    rope = rope_of(case, positions)
    run = jax.jit(
        lambda arrays: cpu_kernels.write_and_attend(
            **arrays,
            batch=batch,
            cos=None if rope is None else rope.cos[:, 0],
            sin=None if rope is None else rope.sin[:, 0],
            interleaved=case.interleaved,
            eps=1e-5,
            scale=case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            isa=isa_or_skip(isa),
        )
    )
    atol = 1e-5 if case.dtype == "float32" else 2e-2
    for got, want in zip(run(arrays), expected, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(got, want, atol=atol, equal_nan=True)


def test_tokens_of_a_sequence_may_be_rows_of_their_own() -> None:
    """They read keys that others of the same step have to write first: NaN until then."""
    isa_or_skip("portable")
    case = Case(((70, 90), (33, 200)))
    arrays, batch = step(case)
    positions = arrays.pop("positions")
    run = jax.jit(
        lambda arrays, batch: cpu_kernels.write_and_attend(
            **arrays, batch=batch, cos=None, sin=None, scale=case.head_dim**-0.5
        )
    )
    chunks = run(arrays, batch)
    for _ in range(20):
        rows = run(arrays, one_token_rows(batch, positions))
        for got, want in zip(rows, chunks, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5, equal_nan=True)


def test_pages_are_updated_in_place() -> None:
    """The kernel itself refuses pages that XLA copied for it."""
    isa_or_skip("portable")
    case = Case(((1, 40), (9, 20)))
    arrays, batch = step(case)
    options = {"cos": None, "sin": None, "scale": 1.0}

    def layers(qkv, pages, slot_mapping):
        for i in range(3):
            out, *pages[i] = cpu_kernels.write_and_attend(
                qkv, *pages[i], batch, slot_mapping, **options
            )
            qkv = qkv + out.reshape(qkv.shape[0], 2, 3, -1)[:, :, :1]
        return qkv, pages

    pages = [[jnp.zeros_like(arrays["k_pages"]) for _ in range(2)] for _ in range(3)]
    compiled = jax.jit(layers, donate_argnums=1).lower(arrays["qkv"], pages, arrays["slot_mapping"])
    compiled = compiled.compile()
    one = arrays["k_pages"].nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < one
    assert compiled.memory_analysis().alias_size_in_bytes >= 6 * one
    jax.block_until_ready(compiled(arrays["qkv"], pages, arrays["slot_mapping"]))
