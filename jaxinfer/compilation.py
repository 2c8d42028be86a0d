"""Buckets, and the programs compiled for them: ahead of time, in parallel, never by surprise."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def buckets(largest: int) -> tuple[int, ...]:
    """Return the sizes to which counts in [1, largest] are padded: 1, 4, then powers of two.

    A single sequence deserves its own program, for latency; 2 and 3 hardly cost less than 4.
    """
    sizes = {1, largest}
    size = 4
    while size < largest:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def bucket_of(count: int, sizes: Sequence[int]) -> int:
    """Return the smallest size that holds `count`."""
    for size in sizes:
        if count <= size:
            return size
    raise AssertionError(f"{count} exceeds the largest bucket {sizes[-1]}")


class Programs:
    """Compiled programs by key.

    A missing one is compiled on first use and counted: after warm-up that must not happen.

    Args:
        lowerings: How to lower each program that may be needed, most urgent first.
    """

    def __init__(self, lowerings: Mapping[Hashable, Callable[[], jax.stages.Lowered]]):
        self._lowerings = dict(lowerings)
        self._compiled: dict[Hashable, Any] = {}

    def __getitem__(self, key: Hashable) -> Any:
        if key not in self._compiled:
            self._compiled[key] = self._lowerings[key]().compile()
        return self._compiled[key]

    def __len__(self) -> int:
        return len(self._compiled)

    def lower(self, key: Hashable) -> jax.stages.Lowered:
        """Trace a program without compiling it, for inspection."""
        return self._lowerings[key]()

    def compile_all(
        self, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Compile what is missing, several at a time; `on_progress` gets programs done, in all."""
        missing = [key for key in self._lowerings if key not in self._compiled]
        on_progress(0, len(missing))
        pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
        try:
            futures = {pool.submit(self._build, key): key for key in missing}
            for done, future in enumerate(as_completed(futures), start=1):
                self._compiled[futures[future]] = future.result()
                on_progress(done, len(missing))
        finally:
            # After Ctrl-C nobody waits for the programs still queued.
            pool.shutdown(wait=False, cancel_futures=True)

    def _build(self, key: Hashable) -> Any:
        return self._lowerings[key]().compile()

    def keys(self) -> Iterable[Hashable]:
        """All programs that may be needed."""
        return self._lowerings.keys()


class CompileGuard:
    """Counts the compilations that happen in a thread while it serves.

    Listens to XLA itself, so a stray jnp call in the serving loop is seen as well as a bucket that
    warm-up forgot.

    Attributes:
        count: Compilations inside `watching()` blocks since `reset`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._active = threading.local()
        self._listening = True
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @contextmanager
    def watching(self):
        """Count what this thread compiles inside the block."""
        self._active.on = True
        try:
            yield
        finally:
            self._active.on = False

    def reset(self) -> None:
        """Forget the compilations so far: warm-up is over."""
        self.count = 0

    def close(self) -> None:
        """Stop listening; a second time does nothing."""
        if self._listening:
            jax.monitoring.unregister_event_duration_listener(self._on_event)
        self._listening = False

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT and getattr(self._active, "on", False):
            self.count += 1


def use_persistent_cache(directory: Path) -> None:
    """Keep compiled programs on disk, so that the next start need not compile them again."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
