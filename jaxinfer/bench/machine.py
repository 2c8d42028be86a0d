"""What the machine is and what it can do at most, measured in the same run as what it did.

Ceilings are the best of several ways: the rate of products of this number type by XLA and by the
CPU kernels, and the rate of reading memory that no cache holds.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import cpu_kernels
from jaxinfer.config import EngineConfig

_READ_BYTES = 256 * 2**20
_PRODUCT_SIZE = 1536
_REPEATS = 5


def describe_machine() -> dict[str, Any]:
    """Return hardware and versions: without them a figure means nothing."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    return {
        "device": cpu_name() if on_cpu else device.device_kind,
        "platform": device.platform,
        "cores": usable_cores(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxinfer": _version("jaxinfer"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def describe_settings(model_name: str, config: EngineConfig) -> dict[str, Any]:
    """Return the resolved settings that decide speed."""
    names = (
        "dtype", "quantization", "kv_cache_dtype", "kernels", "max_num_seqs",
        "max_num_batched_tokens", "num_decode_steps", "page_size", "max_model_len",
        "enable_prefix_caching", "overlap", "tensor_parallel_size",
    )  # fmt: skip
    return {"model": model_name, **{name: getattr(config, name) for name in names}}


def measure_ceilings(config: EngineConfig) -> dict[str, float]:
    """Return what this machine can do at most, with the number types of resolved settings.

    Returns:
        "product_gop_s", billions of operations a second in a square product of the weights' type,
        and "read_gb_s", of memory.
    """
    fmt = config.quantization or config.dtype
    rates = [_xla_product(fmt)]
    if config.kernels == "cpu":
        rates.append(_kernel_product(fmt))
    return {"product_gop_s": max(rates) / 1e9, "read_gb_s": _read_rate() / 1e9}


def usable_cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the processor's name as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _xla_product(fmt: str) -> float:
    n = _PRODUCT_SIZE
    dtype, result = {
        "int8": (jnp.int8, jnp.int32),
        "bfloat16": (jnp.bfloat16, jnp.float32),
        "float32": (jnp.float32, jnp.float32),
    }[fmt]
    x = jnp.ones((n, n), dtype)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=result))
    return 2 * n**3 / _shortest(lambda: jax.block_until_ready(multiply(x, x)))


def _kernel_product(fmt: str) -> float:
    n = _PRODUCT_SIZE
    weight = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    packed = jnp.asarray(cpu_kernels.pack(weight, fmt))
    x = jnp.asarray(weight, jnp.float32 if fmt == "float32" else jnp.bfloat16)
    multiply = jax.jit(lambda x, w: cpu_kernels.linear(x, w, fmt=fmt, out_features=n))
    return 2 * n**3 / _shortest(lambda: jax.block_until_ready(multiply(x, packed)))


def _read_rate() -> float:
    if jax.default_backend() != "cpu":
        data = jnp.ones(_READ_BYTES // 4, jnp.float32)
        add = jax.jit(jnp.sum)
        return _READ_BYTES / _shortest(lambda: add(data).block_until_ready())
    # A thread a core, each with a part of its own; NumPy lets go of the interpreter.
    threads = usable_cores()
    # Not zeros: those would all be one page of memory.
    parts = [np.ones(_READ_BYTES // 8 // threads, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        return sum(p.nbytes for p in parts) / _shortest(lambda: list(pool.map(np.max, parts)))


def _shortest(call: Callable[[], Any]) -> float:
    """Return seconds of the fastest call."""
    call()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
