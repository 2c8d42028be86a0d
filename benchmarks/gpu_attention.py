"""Attention on the device: is it right, which bandwidth decode reaches, and which rate prefill."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_timing import (
    Budget,
    Ceilings,
    Table,
    chained,
    ms,
    percent,
    random_values,
    reported,
    seconds,
)
from pallas_kernels import KVPages, RaggedBatch, has_scales, paged_attention, write_kv

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest error over the largest output, by the dtype of the queries."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention that is measured: Llama-3-8B's.

    Attributes:
        num_heads: N.
        num_kv_heads: K.
        head_dim: H.
        page_size: Tokens per page.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in bfloat16."""
        return 2 * 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Check:
    """One step to compare with the oracle.

    Attributes:
        max_query_len: Most tokens of a row that is computed as a decode row.
        rows: (new tokens, keys in all), decode rows first.
    """

    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    head_dim: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    max_query_len: int = 1
    rows: tuple[tuple[int, int], ...] = ((1, 1), (1, 16), (1, 777), (33, 33), (70, 300), (128, 640))

    @property
    def name(self) -> str:
        parts = [self.dtype, f"H {self.head_dim}"]
        parts += [f"{self.kv_dtype} pages"] if self.kv_dtype else []
        parts += [f"{self.max_query_len} tokens a row"] if self.max_query_len > 1 else []
        parts += [name for name in ("window", "softcap", "sinks") if getattr(self, name)]
        return ", ".join(parts)


CHECKS = (
    Check(),
    Check(dtype="float32"),
    Check(dtype="float16", head_dim=64),
    Check(head_dim=256, window=100, softcap=20.0),
    Check(head_dim=64, window=128, sinks=True),
    Check(head_dim=80),
    Check(kv_dtype="int8"),
    Check(kv_dtype="float8_e4m3fn"),
    Check(max_query_len=8, rows=((1, 777), (3, 50), (8, 640), (33, 33))),
)


def check_all(table: Table, budget: Budget, checks: tuple[Check, ...], impl: str) -> None:
    """Compare write, decode and prefill with the float64 oracle, one row for each check."""
    for check in checks:
        if budget.left() < 0:
            table.row("correct?", check.name, "no time")
            continue
        try:
            error = largest_error(check, impl)
        except Exception as e:
            table.row("correct?", check.name, "", "", "", f"{type(e).__name__}: {str(e)[:200]}")
            continue
        is_right = error <= TOLERANCE[check.dtype]
        table.num_wrong += not is_right
        verdict = "ok" if is_right else "**WRONG**"
        table.row("correct?", check.name, "", f"error {error:.1e}", "", verdict)


def largest_error(check: Check, impl: str) -> float:
    """Return the largest error over the largest output; NaN anywhere gives infinity.

    What must not matter is NaN: pages of nobody, slots behind a row's last key.
    """
    K, N, H, page_size = 2, 8, check.head_dim, 16
    rng = np.random.default_rng(0)
    dtype, kv_dtype = jnp.dtype(check.dtype), jnp.dtype(check.kv_dtype or check.dtype)
    used = [math.ceil(keys / page_size) for _, keys in check.rows]
    num_pages, num_keys = sum(used) + 4, sum(keys for _, keys in check.rows)
    order = iter(rng.permutation(num_pages).tolist())
    tables = [[next(order) for _ in range(n)] for n in used]
    page_table = np.full((len(tables) + 2, max(used) + 1), num_pages + 7, np.int32)
    for i, pages in enumerate(tables):
        page_table[i, : len(pages)] = pages
    slots = [
        page_table[i, s // page_size] * page_size + s % page_size
        for i, (_, keys) in enumerate(check.rows)
        for s in range(keys)
    ]
    k, v = (jnp.asarray(rng.normal(size=(num_keys, K, H)), dtype) for _ in range(2))
    pages = jax.jit(partial(write_kv, impl=impl))(
        k, v, _poisoned(kv_dtype, (num_pages, K, page_size, H)), jnp.asarray(slots, jnp.int32)
    )
    lengths = [new for new, _ in check.rows] + [0, 0]
    batch = RaggedBatch(
        page_table=jnp.asarray(page_table),
        seq_lens=jnp.asarray([keys for _, keys in check.rows] + [0, 0], jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        num_decode_rows=jnp.asarray(sum(0 < n <= check.max_query_len for n in lengths), jnp.int32),
        num_rows=jnp.asarray(len(check.rows), jnp.int32),
    )
    q = jnp.asarray(rng.normal(size=(sum(lengths) + 5, N, H)), dtype)
    sinks = jnp.asarray(rng.normal(size=N), dtype) if check.sinks else None
    out = paged_attention(
        q,
        pages.k_pages,
        pages.v_pages,
        batch,
        scale=H**-0.5,
        sliding_window=check.window,
        logit_softcap=check.softcap,
        sinks=sinks,
        k_scales=pages.k_scales,
        v_scales=pages.v_scales,
        max_query_len=check.max_query_len,
        impl=impl,
    )
    out = np.asarray(out).astype(np.float64)
    expected = np.zeros_like(out)
    stored = [_stored(x, s) for x, s in zip(pages[:2], pages[2:], strict=True)]
    token = 0
    for i, (new, keys) in enumerate(check.rows):
        s = np.arange(keys)
        where = (page_table[i, s // page_size], slice(None), s % page_size)
        rows = slice(token, token + new)
        expected[rows] = oracle(
            np.asarray(q)[rows].astype(np.float64),
            stored[0][where],
            stored[1][where],
            None if sinks is None else np.asarray(sinks).astype(np.float64),
            check,
        )
        token += new
    error = np.abs(out - expected).max() / np.abs(expected).max()
    return math.inf if math.isnan(error) else float(error)


def oracle(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None, check: Check
) -> np.ndarray:
    """Return float64 [n, N, H] of one row: q [n, N, H] are its last tokens, k and v [S, K, H]."""
    (n, N, H), (S, K, _) = q.shape, k.shape
    k, v = (np.repeat(x, N // K, axis=1) for x in (k, v))
    scores = np.einsum("qnh,snh->nqs", q, k) * H**-0.5
    if check.softcap is not None:
        scores = check.softcap * np.tanh(scores / check.softcap)
    distance = np.arange(S - n, S)[:, None] - np.arange(S)[None]
    visible = (distance >= 0) & (distance < (check.window or S))
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (N, n, 1))], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :S]
    return np.einsum("nqs,snh->qnh", weights, v)


def _poisoned(dtype: Any, shape: tuple[int, ...]) -> KVPages:
    if not has_scales(dtype):
        return KVPages(jnp.full(shape, jnp.nan, dtype), jnp.full(shape, jnp.nan, dtype))
    pages, scales = jnp.zeros(shape, dtype), jnp.full(shape[:3], jnp.nan, jnp.float32)
    return KVPages(pages, pages, scales, scales)


def _stored(pages: Any, scales: Any) -> np.ndarray:
    values = np.asarray(pages).astype(np.float64)
    return values if scales is None else values * np.asarray(scales).astype(np.float64)[..., None]


def decode_batch(heads: Heads, batch: int, context: int) -> RaggedBatch:
    """Return a batch of one token for each of `batch` rows; its page table is to be filled in."""
    ones = jnp.arange(batch + 1, dtype=jnp.int32)
    return RaggedBatch(
        page_table=jnp.zeros((batch, context // heads.page_size), jnp.int32),
        seq_lens=jnp.full((batch,), context, jnp.int32),
        query_start_loc=ones,
        num_decode_rows=jnp.int32(batch),
        num_rows=jnp.int32(batch),
    )


def prefill_batch(heads: Heads, tokens: int, context: int) -> RaggedBatch:
    """Return a batch of one chunk of `tokens`, the last of a sequence of `context`."""
    return RaggedBatch(
        page_table=jnp.arange(context // heads.page_size, dtype=jnp.int32)[None],
        seq_lens=jnp.full((1,), context, jnp.int32),
        query_start_loc=jnp.asarray([0, tokens], jnp.int32),
        num_decode_rows=jnp.int32(0),
        num_rows=jnp.int32(1),
    )


def attend_paged(impl: str, heads: Heads, q, pages, batch, tables, i):
    """One attention; call i of a chain has a page table of its own, so that no cache helps."""
    batch = batch._replace(page_table=tables[i % tables.shape[0]])
    return paged_attention(q, *pages, batch, scale=heads.head_dim**-0.5, impl=impl)


def measure_decode(
    table: Table,
    budget: Budget,
    ceilings: Ceilings,
    heads: Heads,
    *,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    pool_bytes: int,
    calls: int,
    impl: str,
    compare: tuple[tuple[int, int], ...],
    share: float,
) -> None:
    """Print the bandwidth of decode for each batch and context that the pool has room for."""
    num_pages = pool_bytes // (heads.token_bytes * heads.page_size)
    shape = (num_pages, heads.num_kv_heads, heads.page_size, heads.head_dim)
    pages = tuple(random_values(shape, jnp.bfloat16, seed) for seed in (0, 1))
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    for batch, context in itertools.product(batches, contexts):
        case = f"batch {batch}, context {context}"
        needed = batch * context // heads.page_size
        if needed > num_pages:
            table.row("decode", case, "", "", "", "more pages than memory has room for")
            continue
        if budget.left(share) < 0:
            table.row("decode", case, "", "", "", "no time")
            continue
        n = max(2, min(calls, num_pages // needed))
        with reported(table, "decode", case) as failed:
            groups = np.resize(order, (n, batch, context // heads.page_size))
            args = (pages, decode_batch(heads, batch, context), jnp.asarray(groups))
            q = random_values((batch, heads.num_heads, heads.head_dim), jnp.bfloat16)
            num_bytes = batch * context * heads.token_bytes + 2 * q.nbytes
            program = chained(partial(attend_paged, impl, heads), n)
            took = seconds(program, q, *args) / n
        if failed:
            continue
        notes = []
        if (batch, context) in compare:
            notes = list(_others_of_decode(heads, q, args, batch, context, took, n))
        rate = num_bytes / took
        cells = (ms(took), f"{rate / 1e9:.0f} GB/s", percent(rate / ceilings.bandwidth))
        table.row("decode", case, *cells, "; ".join(notes))


def _others_of_decode(
    heads: Heads, q: jax.Array, args: Any, batch: int, context: int, ours: float, calls: int
) -> Iterator[str]:
    """What XLA takes for the same, and cuDNN for keys that are not in pages."""
    yield _versus(
        "XLA",
        ours,
        lambda: seconds(chained(partial(attend_paged, "xla", heads), 1), q, *args, at_least=0.02),
    )
    shape = (batch, context, heads.num_kv_heads, heads.head_dim)

    def cudnn() -> float:
        keys = [random_values(shape, jnp.bfloat16, seed) for seed in (2, 3)]

        def attend(q, k, v, _):
            out = jax.nn.dot_product_attention(q[:, None], k, v, implementation="cudnn")
            return out[:, 0]

        return seconds(chained(attend, calls), q, *keys) / calls

    yield _versus("cuDNN without pages", ours, cudnn)


def measure_prefill(
    table: Table,
    budget: Budget,
    ceilings: Ceilings,
    heads: Heads,
    *,
    cases: tuple[tuple[int, int], ...],
    impl: str,
    xla_up_to: int,
    calls: int,
    share: float,
) -> None:
    """Print the rate of prefill for each (tokens, context), and what others take."""
    for tokens, context in cases:
        case = f"{tokens} tokens" + (f" behind {context - tokens}" if context > tokens else "")
        if budget.left(share) < 0:
            table.row("prefill", case, "", "", "", "no time")
            continue
        shape = (context // heads.page_size, heads.num_kv_heads, heads.page_size, heads.head_dim)
        pairs = tokens * (context - tokens) + tokens * (tokens + 1) // 2
        flops = 4 * heads.num_heads * heads.head_dim * pairs
        with reported(table, "prefill", case) as failed:
            pages = tuple(random_values(shape, jnp.bfloat16, seed) for seed in (0, 1))
            q = random_values((tokens, heads.num_heads, heads.head_dim), jnp.bfloat16)
            batch = prefill_batch(heads, tokens, context)
            program = chained(partial(attend_paged, impl, heads), calls)
            took = seconds(program, q, pages, batch, batch.page_table[None]) / calls
        if failed:
            continue
        notes = []
        if tokens == context:
            notes.append(_versus("cuDNN", took, partial(_dense, "cudnn", heads, tokens)))
            if tokens <= xla_up_to:
                notes.append(_versus("XLA", took, partial(_dense, "xla", heads, tokens)))
        rate = flops / took
        cells = (ms(took), f"{rate / 1e12:.3g} TFLOP/s", percent(rate / ceilings.matmul))
        table.row("prefill", case, *cells, "; ".join(notes))


def _dense(implementation: Any, heads: Heads, tokens: int) -> float:
    """Seconds of JAX's own causal attention over keys that are not in pages."""
    shape = (1, tokens, heads.num_heads, heads.head_dim)
    q, k, v = (
        random_values((*shape[:2], n, shape[3]), jnp.bfloat16, seed)
        for seed, n in enumerate((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))
    )

    def attend(q, k, v, _):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    return seconds(chained(attend, 4), q, k, v) / 4


def _versus(name: str, ours: float, measure: Any) -> str:
    """Return how another implementation compares, or why it does not run."""
    try:
        theirs = measure()
    except Exception as e:
        return f"{name}: {type(e).__name__} {str(e).splitlines()[0][:60] if str(e) else ''}"
    return f"{name} {ms(theirs)} ({theirs / ours:.2f} ×)"
