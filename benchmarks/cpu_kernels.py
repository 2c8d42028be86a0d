"""Each CPU kernel against plain XLA, and against what the machine can do, in one run.

    .venv/bin/python benchmarks/cpu_kernels.py
    taskset -c 1 .venv/bin/python benchmarks/cpu_kernels.py    # one thread

Times are the shortest of many. Layers are those of SmolLM2-135M, up to 8 one after the other: the
head comes from memory as it does in a step, the others may come from the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import cpu_kernels
from pallas_kernels import RaggedBatch, paged_attention

SHAPES = {"qkv": (576, 960), "gate, up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
PAGE_SIZE, KV_HEADS, GROUP, HEAD_DIM = 16, 3, 3, 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    read = _read_rate()
    print(f"{', '.join(cpu_kernels.load_library().isa_names[:1])}; memory read {read:.0f} GB/s")
    print("| what | rows | kernel µs | XLA / kernel | GB/s | of reading | GOP/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    rng = np.random.default_rng(0)
    for fmt in cpu_kernels.FORMATS:
        for name, (inputs, outputs) in SHAPES.items():
            for rows in args.rows:
                layer_bytes = inputs * outputs * cpu_kernels.FORMATS[fmt][1].itemsize
                count = max(1, min(8, 64_000_000 // layer_bytes))
                kernel, plain = _linear(rng, fmt, rows, inputs, outputs, count, args.runs)
                _row(
                    f"{fmt} {name}", rows, kernel, plain, layer_bytes, rows * inputs * outputs, read
                )
    for dtype in ("float32", "bfloat16"):
        for rows, new, keys in ((1, 1, 256), (16, 1, 256), (1, 256, 256), (1, 256, 2048)):
            kernel, plain, moved, products = _attention(rng, dtype, rows, new, keys, args.runs)
            name = f"{dtype} attention of {new} to {keys}"
            _row(name, rows, kernel, plain, moved, products, read)


def _row(
    name: str, rows: int, kernel: float, plain: float, moved: int, products: int, read: float
) -> None:
    rate = moved / kernel / 1e9
    print(
        f"| {name} | {rows} | {kernel * 1e6:.0f} | {plain / kernel:.1f} | {rate:.1f} "
        f"| {rate / read:.0%} | {2 * products / kernel / 1e9:.0f} |",
        flush=True,
    )


def _linear(
    rng: np.random.Generator,
    fmt: str,
    rows: int,
    inputs: int,
    outputs: int,
    count: int,
    runs: int,
) -> tuple[float, float]:
    """Return seconds a layer, by the kernel and by XLA from the layout that is best for it."""
    x = jnp.asarray(rng.normal(size=(rows, inputs)), jnp.float32)
    dense = [rng.normal(size=(outputs, inputs)).astype(np.float32) for _ in range(count)]
    packed = [jnp.asarray(cpu_kernels.pack(weight, fmt)) for weight in dense]

    def by_kernel(x, weights):
        return [cpu_kernels.linear(x, w, fmt=fmt, out_features=outputs)[:1, :1] for w in weights]

    if fmt == "int8":
        plain_weights = [jnp.asarray(cpu_kernels.quantize_rows(weight)[0]) for weight in dense]
        product = cpu_kernels.int8_matmul
    elif fmt == "bfloat16":
        plain_weights = [jnp.asarray(weight, jnp.bfloat16) for weight in dense]
        product = _bfloat16_product
    else:
        plain_weights = [jnp.asarray(weight.T) for weight in dense]
        product = jnp.matmul

    def by_xla(x, weights):
        return [product(x, w)[:1, :1] for w in weights]

    kernel = _shortest(jax.jit(by_kernel), runs, x, packed) / count
    return kernel, _shortest(jax.jit(by_xla), runs, x, plain_weights) / count


def _bfloat16_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    contract = (((1,), (1,)), ((), ()))
    # One row is multiplied 15 times slower than four.
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, max(0, 4 - x.shape[0])), (0, 0)))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)


def _attention(
    rng: np.random.Generator, dtype: str, rows: int, new: int, keys: int, runs: int
) -> tuple[float, float, int, int]:
    """Return seconds by kernel and by XLA, bytes of keys and values, and multiplications."""
    pages_each = -(-keys // PAGE_SIZE)
    shape = (rows * pages_each, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pages = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2)]
    q = jnp.asarray(rng.normal(size=(rows * new, KV_HEADS * GROUP, HEAD_DIM)), dtype)
    table = rng.permutation(rows * pages_each).reshape(rows, pages_each).astype(np.int32)
    batch = RaggedBatch(
        page_table=jnp.asarray(table),
        seq_lens=jnp.full(rows, keys, jnp.int32),
        query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32) * new,
        num_decode_rows=jnp.int32(rows if new == 1 else 0),
        num_rows=jnp.int32(rows),
    )
    times = [
        _shortest(lambda *a, f=f: f(*a, scale=0.125), runs, q, *pages, batch)
        for f in (cpu_kernels.paged_attention, paged_attention)
    ]
    seen = keys - (new - 1) / 2
    products = int(2 * rows * new * seen * KV_HEADS * GROUP * HEAD_DIM)
    return times[0], times[1], sum(p.nbytes for p in pages), products


def _shortest(call: Callable[..., object], runs: int, *args: object) -> float:
    """Return seconds of the fastest of `runs` calls, or of as many as fit three seconds."""
    jax.block_until_ready(call(*args))
    best, end = float("inf"), time.perf_counter() + 3.0
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return best


def _read_rate() -> float:
    """Return GB/s at which XLA sums 256 MB, the best of 10."""
    data = jnp.ones(64_000_000, jnp.float32)
    return data.nbytes / _shortest(jax.jit(jnp.sum), 10, data) / 1e9


if __name__ == "__main__":
    main()
