"""What the kernels and a whole model reach on this machine's GPU: one table, six minutes at most.

    make gpu                      # or: python benchmarks/gpu.py
    python benchmarks/gpu.py --dry-run

Needs jax with a GPU, flax and numpy; downloads nothing. Every rate stands beside a ceiling that was
measured in the same run: a copy of device memory, and a large matrix product. Rows are printed as
they are measured, a part that fails costs only its own rows, and when the time is up what there is
stands. `--dry-run` runs all of it in tiny shapes through the kernels' interpreter, on any machine:
its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run as a script, perhaps where nothing is installed but jax.
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

from benchmarks.gpu_attention import (
    CHECKS,
    Check,
    Heads,
    check_all,
    measure_decode,
    measure_prefill,
)
from benchmarks.gpu_model import LLAMA_8B, Workload, measure_model
from benchmarks.gpu_timing import Budget, Table, measure_ceilings


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        heads: Of the attention that is timed alone.
        batches: Of decode.
        contexts: Of decode.
        compared: (batch, context) of decode for which other implementations are timed.
        prefills: (new tokens, keys in all).
        xla_up_to: Tokens up to which XLA's own attention is timed; it takes their square in memory.
        checks: Steps held to the oracle.
        workload: Steps of the whole model.
        copy_bytes: Array that is copied.
        matmul_size: Side of the matrices that are multiplied.
        pool_bytes: Most memory that the pages of the decode section take.
        calls: Of attention in one program, at most.
    """

    heads: Heads = Heads()
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    contexts: tuple[int, ...] = (512, 2048, 8192, 32_768)
    compared: tuple[tuple[int, int], ...] = ((1, 8192), (16, 2048), (64, 2048))
    prefills: tuple[tuple[int, int], ...] = (
        *((n, n) for n in (1024, 2048, 4096, 8192, 16_384, 32_768)),
        (2048, 32_768),
    )
    xla_up_to: int = 4096
    checks: tuple[Check, ...] = CHECKS
    workload: Workload = Workload(hf=LLAMA_8B)
    copy_bytes: int = 2**31
    matmul_size: int = 8192
    pool_bytes: int = 36 * 2**30
    calls: int = 16


TINY = Sizes(
    heads=Heads(num_heads=4, num_kv_heads=2, head_dim=64),
    batches=(1, 2),
    contexts=(32,),
    compared=((2, 32),),
    prefills=((32, 32), (16, 32)),
    xla_up_to=32,
    checks=(
        Check(dtype="float32", head_dim=64, max_query_len=2, rows=((2, 20), (17, 33))),
        Check(kv_dtype="int8", head_dim=64, window=16, sinks=True, rows=((1, 20), (17, 33))),
    ),
    workload=Workload(
        hf={
            **LLAMA_8B,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": 128,
        },
        batches=(2,),
        context=32,
        prompt=32,
    ),
    copy_bytes=2**16,
    matmul_size=64,
    pool_bytes=2**19,
    calls=2,
)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    args = _arguments(argv)
    with _ending_in(args.budget):
        return _measure(args)


def _measure(args: argparse.Namespace) -> int:
    budget = Budget(args.budget)
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda") and not args.dry_run:
        print(
            f"no GPU here: jax {jax.__version__} sees {device.device_kind}; "
            "run this on a GPU machine, or see that the script works with --dry-run"
        )
        return 0
    impl = args.impl or ("interpret" if args.dry_run else "pallas")
    print(_conditions(device, impl), end="\n\n")
    table = Table()
    run(table, budget, TINY if args.dry_run else Sizes(), impl, _memory(device))
    print(f"\n{budget.used:.0f} s of {args.budget:.0f}")
    if table.num_wrong:
        print(f"{table.num_wrong} results are not right: what is fast here may be wrong")
    return 1 if table.num_wrong else 0


def run(table: Table, budget: Budget, sizes: Sizes, impl: str, memory_bytes: float) -> None:
    """Run every section; one that fails has a row with the reason, and the next goes on."""
    ceilings = measure_ceilings(table, copy_bytes=sizes.copy_bytes, matmul_size=sizes.matmul_size)
    pool = int(min(sizes.pool_bytes, 0.4 * memory_bytes))
    sections: dict[str, Callable[[], Any]] = {
        "correct?": lambda: check_all(table, budget, sizes.checks, impl),
        "prefill": lambda: measure_prefill(
            table,
            budget,
            ceilings,
            sizes.heads,
            cases=sizes.prefills,
            impl=impl,
            xla_up_to=sizes.xla_up_to,
            calls=min(sizes.calls, 4),
            share=0.35,
        ),
        "decode": lambda: measure_decode(
            table,
            budget,
            ceilings,
            sizes.heads,
            batches=sizes.batches,
            contexts=sizes.contexts,
            pool_bytes=pool,
            calls=sizes.calls,
            impl=impl,
            compare=sizes.compared,
            share=0.6,
        ),
        "model": lambda: measure_model(
            table, budget, ceilings, sizes.workload, impl=impl, memory_bytes=memory_bytes
        ),
    }
    for name, section in sections.items():
        try:
            section()
        except Exception as e:
            table.row(name, "", "", "", "", f"{type(e).__name__}: {str(e)[:300]}")
        # What a section compiled and allocated is of no use to the next.
        jax.clear_caches()


def _conditions(device: jax.Device, impl: str) -> str:
    """Return hardware and versions: without them the figures mean nothing."""
    client = getattr(device.client, "platform_version", "").splitlines()
    return (
        f"{device.device_kind}; jax {jax.__version__} ({' '.join(client)}); "
        f"Python {platform.python_version()}; attention {impl}"
    )


def _memory(device: jax.Device) -> float:
    """Return the bytes that this process may allocate."""
    stats = device.memory_stats() or {}
    return float(stats.get("bytes_limit", 2**30))


@contextmanager
def _ending_in(budget: float) -> Iterator[None]:
    """End the process soon after the time is up, whatever it is doing.

    A compile cannot be interrupted, so the end is kept from outside: by a thread that says so, and
    where no thread comes to run any more, by the operating system.
    """
    alarm = threading.Timer(max(0.0, budget + 15), _stop)
    alarm.daemon = True
    alarm.start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, budget + 20))
    try:
        yield
    finally:
        alarm.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _stop() -> None:
    print("\ntime is up: the rest was not measured", flush=True)
    os._exit(0)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=320.0, help="seconds for everything")
    parser.add_argument("--impl", help="of attention, e.g. triton; the best there is if left out")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
