"""`python -m pallas_kernels.autotune`: measure tile sizes on the GPU here, and write the table.

The table is read back by `pallas_kernels.tiles`; commit it. Sizes that spill registers, do not fit
into shared memory or change the result are out, whatever their time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.capability import FLOAT_DTYPES, SCALED_DTYPES, current_device
from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.tiles import (
    TABLE,
    DecodeTiles,
    Kernel,
    PrefillTiles,
    TileKey,
    Tiles,
    default_decode_tiles,
    default_prefill_tiles,
    read_table,
    write_table,
)
from pallas_kernels.triton.decode import paged_decode
from pallas_kernels.triton.prefill import paged_prefill

Measure = Callable[[Kernel, TileKey, Tiles], float]
"""Seconds of one call with these sizes; raises one of `FAILURES` where they are no good."""

MIN_GAIN = 1.03
"""How much faster than the default other sizes must be: less is noise."""

KERNELS: tuple[Kernel, ...] = ("prefill", "decode")
NUM_HEADS, NUM_KV_HEADS, PAGE_SIZE = 32, 8, 16

STEPS: dict[Kernel, tuple[tuple[int, int], ...]] = {
    # A long prompt's first chunk and a later one; a batch at a middling context.
    "prefill": ((2048, 2048), (2048, 8192)),
    "decode": ((1, 4096),) * 64,
}
"""(New tokens, keys) of each row of the step that is timed."""


class WrongResult(RuntimeError):
    """These sizes do not give what the default ones give."""


FAILURES = (WrongResult, NotImplementedError, ValueError, jax.errors.JaxRuntimeError)


def candidates(kernel: Kernel, key: TileKey) -> Iterator[Tiles]:
    """Yield the sizes to try, the default ones first."""
    default = default_tiles(kernel, key)
    yield default
    others: Iterable[Tiles]
    if kernel == "prefill":
        others = (
            PrefillTiles(block_q=q, block_k=k, num_warps=warps, num_stages=stages)
            for q, k, warps, stages in itertools.product(
                (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)
            )
        )
    else:
        others = (
            DecodeTiles(block_k=k, num_splits=splits, num_warps=warps, num_stages=stages)
            for k, splits, warps, stages in itertools.product(
                (32, 64, 128), (16, 32), (2, 4, 8), (2, 3, 4)
            )
        )
    yield from (tiles for tiles in others if tiles != default)


def default_tiles(kernel: Kernel, key: TileKey) -> Tiles:
    """Return the sizes that are taken where nothing was measured."""
    return default_prefill_tiles(key) if kernel == "prefill" else default_decode_tiles(key)


def tune(
    kernel: Kernel, key: TileKey, measure: Measure, report: Callable[[str], object]
) -> Tiles | None:
    """Return the fastest sizes, the default ones where they are as good; None if none work.

    Args:
        kernel: Which.
        key: Of the case.
        measure: Takes the time.
        report: Is told of every size.
    """
    seconds: dict[Tiles, float] = {}
    for tiles in candidates(kernel, key):
        try:
            seconds[tiles] = measure(kernel, key, tiles)
        except FAILURES as error:
            first_line = str(error).partition("\n")[0]
            report(f"{kernel} {key} {tiles}: {type(error).__name__}: {first_line:.120}")
        else:
            report(f"{kernel} {key} {tiles}: {seconds[tiles] * 1e6:.1f} us")
    if not seconds:
        return None
    best = min(seconds, key=lambda tiles: seconds[tiles])
    default = default_tiles(kernel, key)
    if default in seconds and seconds[default] <= seconds[best] * MIN_GAIN:
        return default
    return best


def tune_all(
    jobs: Sequence[tuple[Kernel, TileKey]],
    measure: Measure,
    table: Path,
    report: Callable[[str], object],
) -> None:
    """Tune each job and put it into the table, which keeps its other entries.

    The table is written after each job, so that what was measured before an interruption stays.
    """
    for kernel, key in jobs:
        best = tune(kernel, key, measure, report)
        if best is None:
            report(f"{kernel} {key}: nothing works")
            continue
        entries = read_table(table.read_text()) if table.exists() else {}
        entries[kernel, key] = best
        table.write_text(write_table(entries))
        report(f"{kernel} {key}: {best} is best")


def make_step(kernel: Kernel, key: TileKey) -> tuple[dict[str, Any], RaggedBatch]:
    """Return arrays of the step that is timed, and where its rows are; pages in random order."""
    rows = STEPS[kernel]
    pages_each = -(-max(keys for _, keys in rows) // PAGE_SIZE)
    num_pages = pages_each * len(rows)
    rng = np.random.default_rng(0)
    new = np.array([n for n, _ in rows])
    batch = RaggedBatch(
        page_table=jnp.asarray(rng.permutation(num_pages).reshape(len(rows), -1), jnp.int32),
        seq_lens=jnp.asarray([keys for _, keys in rows], jnp.int32),
        query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32),
        num_decode_rows=jnp.int32((new == 1).sum()),
        num_rows=jnp.int32(len(rows)),
    )
    shape = (num_pages, NUM_KV_HEADS, PAGE_SIZE, key.head_dim)
    seeds = iter(jax.random.split(jax.random.key(0), 3))
    normal = partial(jax.random.normal, dtype=jnp.float32)
    scaled = key.kv_dtype in SCALED_DTYPES
    scale = 1 / 32 if scaled else 1.0
    arrays: dict[str, Any] = {
        "q": normal(next(seeds), (new.sum(), NUM_HEADS, key.head_dim)).astype(key.dtype),
        "k_pages": (normal(next(seeds), shape) / scale).astype(key.kv_dtype),
        "v_pages": (normal(next(seeds), shape) / scale).astype(key.kv_dtype),
    }
    if scaled:
        arrays |= dict.fromkeys(("k_scales", "v_scales"), jnp.full(shape[:3], scale))
    return arrays, batch


class GpuTimer:
    """`Measure` on the default device.

    Args:
        repeats: Calls that are timed together; the median of five times is taken.
        interpret: Run the kernels by the interpreter instead, for tests.
    """

    def __init__(self, repeats: int = 20, *, interpret: bool = False):
        self._repeats = repeats
        self._interpret = interpret
        self._case: tuple[Kernel, TileKey] | None = None

    def __call__(self, kernel: Kernel, key: TileKey, tiles: Tiles) -> float:
        if self._case != (kernel, key):
            self._arrays, self._batch = make_step(kernel, key)
            default = self._compile(kernel, key, default_tiles(kernel, key))
            self._expected = default(self._arrays, self._batch).astype(jnp.float32)
            self._case = kernel, key
        attend = self._compile(kernel, key, tiles)
        out = attend(self._arrays, self._batch).astype(jnp.float32)
        error = float(jnp.abs(out - self._expected).max())
        if not error < 0.02:
            raise WrongResult(f"differs from the default sizes' result by {error}")
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(self._repeats):
                out = attend(self._arrays, self._batch)
            out.block_until_ready()
            times.append((time.perf_counter() - start) / self._repeats)
        return statistics.median(times)

    def _compile(self, kernel: Kernel, key: TileKey, tiles: Tiles) -> Callable[..., jax.Array]:
        function: Any = paged_prefill if kernel == "prefill" else paged_decode
        how = {"scale": key.head_dim**-0.5, "tiles": tiles, "interpret": self._interpret}

        def attend(arrays: dict[str, Any], batch: RaggedBatch) -> jax.Array:
            return function(**arrays, batch=batch, **how)

        lowered = jax.jit(attend).lower(self._arrays, self._batch)
        options = {} if self._interpret else {_NO_SPILLS: True}
        return lowered.compile(compiler_options=options)


_NO_SPILLS = "xla_gpu_fail_ptx_compilation_on_register_spilling"


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune what the arguments name; 1 where there is no GPU."""
    args = _parser().parse_args(arguments)
    device = current_device()
    generation = device.generation
    if generation is None:
        sys.stderr.write(f"autotune needs a GPU to measure on; the device here is {device.kind}\n")
        return 1
    jobs = [
        (kernel, TileKey.of(generation, head_dim, dtype, kv_dtype or dtype))
        for head_dim, dtype, kv_dtype, kernel in itertools.product(
            args.head_dim, args.dtype, args.kv_dtype or [None], args.kernel
        )
    ]
    tune_all(jobs, GpuTimer(), args.table, lambda line: sys.stderr.write(line + "\n"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.autotune", description=__doc__)
    add = partial(parser.add_argument, nargs="+")
    add("--kernel", choices=KERNELS, default=list(KERNELS))
    add("--head-dim", type=int, default=[128])
    add("--dtype", choices=FLOAT_DTYPES, default=["bfloat16"], help="of queries")
    add("--kv-dtype", choices=(*FLOAT_DTYPES, *SCALED_DTYPES), help="of pages; default: --dtype")
    table = Path(__file__).with_name(TABLE)
    parser.add_argument("--table", type=Path, default=table, help="file to update")
    return parser


if __name__ == "__main__":
    sys.exit(main())
