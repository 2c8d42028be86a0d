"""How much memory the KV pages get when nobody says, and where compiled programs are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax

from jaxinfer.errors import ConfigError

CPU_CACHE_BYTES = 2**30
"""On a CPU the pages share memory with everything else: this much, or what one sequence needs."""

DEVICE_SHARE = 0.8
"""Of what weights and programs leave of a device. The rest is for what was estimated too low: what
programs need only shows up once they are compiled."""


def cache_bytes(one_sequence: int, held: Callable[[], int]) -> int:
    """Return bytes for the KV pages of each device, by what is free now.

    Args:
        one_sequence: Bytes that a sequence of full length needs.
        held: Counts bytes that weights and programs will take of the device. Not called on a CPU:
            its share is small enough, and counting takes a second.

    Raises:
        ConfigError: A device does not tell how much memory it has, or has too little.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(max(CPU_CACHE_BYTES, one_sequence), free // 2)
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(
            f"{device} does not tell its memory; give num_pages or kv_cache_memory_bytes"
        )
    free, taken = stats["bytes_limit"] - stats["bytes_in_use"], held()
    if free <= taken:
        raise ConfigError(
            f"weights and programs take {taken / 2**30:.2f} GiB of each device, of which "
            f"{free / 2**30:.2f} GiB are free; take more devices (tensor_parallel_size), "
            "quantization, or a smaller model"
        )
    return int((free - taken) * DEVICE_SHARE)


def default_cache_dir() -> Path:
    """Return the user's folder for compiled programs (XDG base directory rules)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxinfer" / "xla"
