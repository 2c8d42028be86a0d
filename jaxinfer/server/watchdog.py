"""Notices an engine that has requests and gets nowhere. Knows nothing of HTTP.

A step that hangs in the device, a queue whose first request never fits, a loop that spins: from
outside they look the same, requests and no progress, while every other sign says that all is well.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

from jaxinfer.async_engine import AsyncEngine

logger = logging.getLogger("jaxinfer.server")

POLLS_PER_TIMEOUT = 10
MAX_POLL_S = 1.0
ENGINE_THREAD = "jaxinfer-engine"


class Watchdog(threading.Thread):
    """Compares the engine's counters with what they were.

    Args:
        engine: Watched until it ends.
        timeout_s: Requests without progress for that long are a stall. A step takes as long as it
            takes, compiling included: it must be longer than the longest.
    """

    def __init__(self, engine: AsyncEngine, timeout_s: float):
        super().__init__(name="jaxinfer-watchdog", daemon=True)
        self._engine = engine
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._last_progress = time.monotonic()
        self._seen: tuple[int, ...] = ()
        self._reported = False

    @property
    def stalled_s(self) -> float:
        """Seconds since the last progress if that is a stall, else 0. Right at any time."""
        self._look()
        if not self._engine.is_alive:
            return 0.0  # a dead engine has told its clients so
        silent_s = time.monotonic() - self._last_progress
        return silent_s if silent_s > self._timeout_s else 0.0

    def run(self) -> None:
        """Look at the engine now and then, and log when a stall begins and when it ends."""
        poll_s = min(self._timeout_s / POLLS_PER_TIMEOUT, MAX_POLL_S)
        while not self._stopped.wait(poll_s) and self._engine.is_alive:
            stalled_s = self.stalled_s
            if stalled_s and not self._reported:
                self._report(stalled_s)
            elif self._reported and not stalled_s:
                logger.warning("the engine makes progress again")
            self._reported = stalled_s > 0

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _look(self) -> None:
        stats = self._engine.stats
        seen = (stats.num_steps, stats.generation_tokens, sum(stats.finished.values()))
        if seen != self._seen or not self._engine.num_live_requests:
            self._seen = seen
            self._last_progress = time.monotonic()

    def _report(self, stalled_s: float) -> None:
        stats = self._engine.stats
        frames = sys._current_frames()
        stacks = [
            "".join(traceback.format_stack(frames[thread.ident]))
            for thread in threading.enumerate()
            if thread.name == ENGINE_THREAD and thread.ident in frames
        ]
        logger.error(
            "no progress for %.0f s with %d live requests (%d running, %d waiting, "
            "%.0f %% of the KV pages in use, %d steps so far); the engine is here:\n%s",
            stalled_s,
            self._engine.num_live_requests,
            stats.num_requests_running,
            stats.num_requests_waiting,
            100 * stats.kv_cache_usage,
            stats.num_steps,
            "".join(stacks),
        )
