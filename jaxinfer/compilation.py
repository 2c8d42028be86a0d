"""Buckets, and the programs compiled for them: ahead of time, in parallel, never by surprise."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

HELD_POLL_S = 0.5
"""A thread that holds programs back looks so often whether the process has ended."""

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
    return sizes_from(count, sizes)[0]


def sizes_from(count: int, sizes: Sequence[int]) -> Sequence[int]:
    """Return the sizes, in ascending order, that hold `count`."""
    for i, size in enumerate(sizes):
        if count <= size:
            return sizes[i:]
    raise AssertionError(f"{count} exceeds the largest bucket {sizes[-1]}")


class Programs:
    """Compiled programs by key. Each is compiled once, whoever asks and however often.

    Left alone, a program is compiled on first use, by whoever uses it. After `start`, threads
    compile all of them, and who needs one that is not ready waits for it, in front of all others.

    Args:
        lowerings: How to lower each program that may be needed, most urgent first.
    """

    def __init__(self, lowerings: Mapping[Hashable, Callable[[], jax.stages.Lowered]]):
        self._lowerings = dict(lowerings)
        self._compiled: dict[Hashable, Any] = {}
        self._errors: dict[Hashable, BaseException] = {}
        # Guards what follows; told when a program is ready, or a thread gone.
        self._changed = threading.Condition()
        self._queue: list[Hashable] = []
        self._building: set[Hashable] = set()
        self._held: set[Hashable] = set()  # of the queue; nobody begins with these
        self._num_threads = 0

    def __getitem__(self, key: Hashable) -> Any:
        if key not in self._compiled:
            self._urge(key)
            self._obtain(key)
        return self._compiled[key]

    def __len__(self) -> int:
        return len(self._compiled)

    def lower(self, key: Hashable) -> jax.stages.Lowered:
        """Trace a program without compiling it, for inspection."""
        return self._lowerings[key]()

    def keys(self) -> Iterable[Hashable]:
        """All programs that may be needed."""
        return self._lowerings.keys()

    @property
    def num_pending(self) -> int:
        """Programs that threads are compiling or still have to."""
        with self._changed:
            return len(self._queue) + len(self._building)

    def start(self, first: Sequence[Hashable] = (), *, hold_rest: bool = False) -> None:
        """Compile what is missing in threads: `first` with all cores, the rest by and by.

        The rest is one low-priority thread's, beside a process that serves already. If it is held,
        it begins with `go_on`: tracing takes the interpreter from whoever reads the weights.
        """
        with self._changed:
            if self._num_threads:
                return
            order = dict.fromkeys([*first, *self._lowerings])
            self._queue = [key for key in order if key not in self._compiled]
            self._held = set(self._queue).difference(first) if hold_rest else set()
            self._num_threads = min(8, os.cpu_count() or 1)
            for i in range(self._num_threads):
                # Not daemons, whoever starts them: one that is inside XLA when Python ends crashes
                # the process.
                threading.Thread(
                    target=self._work,
                    args=(set(first), i == 0),
                    name=f"jaxinfer-compile-{i}",
                    daemon=False,
                ).start()

    def go_on(self) -> None:
        """Let the rest be compiled, if it was held."""
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    def wait(
        self,
        keys: Iterable[Hashable] | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Wait for programs that `start` began, all if None; `on_progress` gets done and total."""
        keys = list(self._lowerings if keys is None else keys)
        with self._changed:
            self._held.difference_update(keys)
            self._changed.notify_all()
        for done, key in enumerate(keys):
            on_progress(done, len(keys))
            self._obtain(key)
        on_progress(len(keys), len(keys))

    def smallest_ready(self, kind: str, sizes: Sequence[int]) -> int | None:
        """Return the first of `sizes` whose program need not be waited for; None if there is none.

        The first one that is not ready will be the next to be compiled: it is wanted.
        """
        if (kind, sizes[0]) in self._compiled or not self._num_threads:
            return sizes[0]
        self._urge((kind, sizes[0]))
        return next((size for size in sizes if (kind, size) in self._compiled), None)

    def close(self) -> None:
        """Give up what is not begun; used later, it is compiled by its user."""
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()

    def _urge(self, key: Hashable) -> None:
        with self._changed:
            if key in self._queue:
                self._queue.remove(key)
                self._queue.insert(0, key)
                self._held.discard(key)
                self._changed.notify_all()

    def _obtain(self, key: Hashable) -> None:
        """Return once a program is compiled, or raise what went wrong."""
        with self._changed:
            while key in self._queue or key in self._building:
                self._changed.wait()
            if key in self._compiled:
                return
            if key not in self._errors:
                self._building.add(key)
        if key not in self._errors:
            self._build(key)
        if key in self._errors:
            raise self._errors[key]

    def _work(self, first: set[Hashable], stays: bool) -> None:
        try:
            while True:
                with self._changed:
                    while stays and self._queue and self._held.issuperset(self._queue):
                        self._changed.wait(HELD_POLL_S)
                        if not threading.main_thread().is_alive():
                            return
                    is_rest = not any(key in first for key in self._queue)
                    # Who ends the process does not wait for programs that nobody will use.
                    ends = not threading.main_thread().is_alive()
                    if not self._queue or ends or (is_rest and not stays):
                        return
                    key = next(key for key in self._queue if key not in self._held)
                    self._queue.remove(key)
                    self._building.add(key)
                if is_rest:
                    _yield_to_others()
                self._build(key)
        finally:
            with self._changed:
                self._num_threads -= 1
                if not self._num_threads:
                    self._queue.clear()
                self._changed.notify_all()

    def _build(self, key: Hashable) -> None:
        compiled, error = None, None
        try:
            compiled = self._lowerings[key]().compile()
        except Exception as e:  # who needs it gets it raised
            error = e
        finally:
            with self._changed:
                self._building.discard(key)
                if compiled is not None:
                    self._compiled[key] = compiled
                elif error is not None:
                    self._errors[key] = error
                self._changed.notify_all()


def _yield_to_others() -> None:
    """Let threads that serve go first, where the system knows priorities of threads (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


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
