"""Ctrl-C, held back until it can do no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_between_steps() -> Generator[threading.Event, None, None]:
    """Hold the first Ctrl-C back until the step in flight is done; the second acts at once.

    A step cut in the middle would leave scheduler and device of two minds about who got a token.
    """
    interrupted = threading.Event()
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield interrupted
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            signal.default_int_handler(number, frame)
        interrupted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted.is_set():  # after the last step, but not lost
        raise KeyboardInterrupt
