"""What all parts of `benchmarks/gpu.py` need: the table, the clock, the machine's ceilings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

COLUMNS = ("what", "case", "time", "rate", "of ceiling", "notes")


class Table:
    """One Markdown table, printed row by row so that a part of it is worth having.

    Attributes:
        num_rows: Rows so far.
        num_wrong: Results that were not what they should be.
    """

    def __init__(self) -> None:
        self.num_rows = self.num_wrong = 0

    def row(self, what: str, case: str, *cells: str) -> None:
        """Print a row; the head comes before the first."""
        if not self.num_rows:
            print(f"| {' | '.join(COLUMNS)} |\n| --- | --- | ---: | ---: | ---: | --- |")
        self.num_rows += 1
        padded = [*cells, *("",) * (len(COLUMNS) - 2 - len(cells))]
        text = " | ".join(" ".join(cell.split()).replace("|", "/") for cell in padded)
        print(f"| {what} | {case} | {text} |", flush=True)


class Budget:
    """How long the run and its sections may take.

    Args:
        seconds: In all.
    """

    def __init__(self, seconds: float):
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def used(self) -> float:
        return time.monotonic() - self.start

    def left(self, share: float = 1.0) -> float:
        """Seconds until `share` of the whole is used up."""
        return share * self.seconds - self.used


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches at best, measured in this run.

    Attributes:
        bandwidth: Bytes/s that a copy reads and writes.
        matmul: bfloat16 FLOP/s of a large product.
    """

    bandwidth: float
    matmul: float

    def floor(self, num_bytes: float, flops: float) -> float:
        """Seconds below which moving this and computing that cannot be done."""
        return max(num_bytes / self.bandwidth, flops / self.matmul)


def measure_ceilings(table: Table, *, copy_bytes: int, matmul_size: int) -> Ceilings:
    """Copy an array, multiply two; print and return the rates, NaN where that failed."""
    bandwidth = matmul = math.nan
    case = f"{copy_bytes / 1e9:.3g} GB"
    with reported(table, "device copy", case):
        x = jnp.zeros((copy_bytes // 2,), jnp.bfloat16)
        # Adding is free, and a plain copy would be optimized away.
        copy_s = seconds(jax.jit(lambda x: x + 1), x)
        bandwidth = 2 * x.nbytes / copy_s
        table.row("device copy", case, ms(copy_s), f"{bandwidth / 1e9:.0f} GB/s")
    n = matmul_size
    case = f"{n}³ bf16"
    with reported(table, "matmul", case):
        a, b = (random_values((n, n), jnp.bfloat16, seed) for seed in (0, 1))
        matmul_s = seconds(jax.jit(lambda a, b: a @ b), a, b)
        matmul = 2 * n**3 / matmul_s
        table.row("matmul", case, ms(matmul_s), f"{matmul / 1e12:.0f} TFLOP/s")
    return Ceilings(bandwidth, matmul)


class reported:
    """Turns an exception inside the block into a row; is true afterwards if there was one."""

    def __init__(self, table: Table, what: str, case: str):
        self._row, self._failed = partial(table.row, what, case), False

    def __enter__(self) -> reported:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        if isinstance(error, Exception):
            self._row("", "", "", f"{type(error).__name__}: {str(error)[:200]}")
            self._failed = True
        return self._failed

    def __bool__(self) -> bool:
        return self._failed


def seconds(function: Callable[..., Any], *args: Any, at_least: float = 0.1) -> float:
    """Return the time of one call when calls follow each other closely.

    The device is kept busy: calls are dispatched without waiting, and the best of three batches of
    them counts.
    """
    jax.block_until_ready(function(*args))  # compiles
    once = _batch(function, args, 1)
    calls = min(max(1, math.ceil(at_least / 3 / max(once, 1e-6))), 1000)
    return min(_batch(function, args, calls) for _ in range(3))


def _batch(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = function(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def chained(attend: Callable[..., jax.Array], calls: int) -> Callable[..., jax.Array]:
    """Return a program that calls `attend(q, *args, i)` so often, each with what the last returned.

    A single call of some microseconds would measure the dispatch.
    """

    def program(q: jax.Array, *args: Any) -> jax.Array:
        for i in range(calls):
            q = attend(q, *args, i)
        return q

    return jax.jit(program)


def random_values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """Return normal values; large arrays repeat some, since drawing takes memory of its own."""
    size = math.prod(shape)
    drawn = min(size, 1 << 22)

    @jax.jit
    def fill() -> jax.Array:
        values = jax.random.normal(jax.random.key(seed), (drawn,), jnp.bfloat16).astype(dtype)
        repeated = jnp.broadcast_to(values, (-(-size // drawn), drawn)).reshape(-1)
        return repeated[:size].reshape(shape)

    return fill()


def ms(seconds: float) -> str:
    """Return a time in the unit that reads best."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def percent(share: float) -> str:
    """Return a share as a whole percentage."""
    return f"{100 * share:.0f} %"
