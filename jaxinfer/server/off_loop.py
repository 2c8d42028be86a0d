"""Work that takes longer than a token of somebody else's stream may wait leaves the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# Tokens spelled, or numbers written: empirically some milliseconds.
MANY = 2**12


async def off_loop_if_many[T](count: int, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, computed in a thread if there are many things to do."""
    return await asyncio.to_thread(function, *args) if count > MANY else function(*args)
