"""How long a request may take and how many streams may be open. Knows neither HTTP nor engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.server.errors import OutOfTimeError, TooManyStreamsError, UnavailableError


class Deadlines:
    """Ends requests: each after its time, and all of them when the server has to go.

    Belongs to one event loop. A request that is ended gets the reason as an exception at the place
    where it waits, so that the client hears of it in the dialect that it speaks.

    Args:
        limit_s: Longest time for one request; None for no limit.
    """

    def __init__(self, limit_s: float | None):
        self._limit_s = limit_s
        self._pending: set[asyncio.Timeout] = set()
        self._over: JaxinferError | None = None

    def new(self) -> Deadline:
        """Return the deadline of a request that begins now."""
        return Deadline(self, None if self._limit_s is None else time.monotonic() + self._limit_s)

    def expire(self) -> None:
        """End all requests, now and from now on: the server shuts down."""
        self._over = UnavailableError("The server is shutting down")
        now = asyncio.get_running_loop().time()
        for timeout in self._pending:
            timeout.reschedule(now)

    @contextlib.asynccontextmanager
    async def hold(self, end: float | None) -> AsyncGenerator[None]:
        """See `Deadline.hold`."""
        loop = asyncio.get_running_loop()
        when = None if end is None else loop.time() + end - time.monotonic()
        timeout = asyncio.timeout_at(loop.time() if self._over else when)
        try:
            async with timeout:
                self._pending.add(timeout)
                try:
                    yield
                finally:
                    self._pending.discard(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._over or OutOfTimeError(
                f"The request took longer than the {self._limit_s:g} s that this server allows; "
                "ask for fewer tokens"
            ) from None


class Deadline:
    """When one request has to end.

    Args:
        deadlines: Those of its server.
        end: `time.monotonic()` seconds; None for never.
    """

    def __init__(self, deadlines: Deadlines, end: float | None):
        self._deadlines = deadlines
        self._end = end

    def hold(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a context that ends what runs in it at the deadline. Enter it as often as needed.

        Raises:
            OutOfTimeError: The request's own time is over.
            UnavailableError: The server's is.
        """
        return self._deadlines.hold(self._end)


def hold_deadline(state: dict[str, Any]) -> contextlib.AbstractAsyncContextManager[None]:
    """Return `Deadline.hold` of the request with this state; a request may have none."""
    deadline: Deadline | None = state.get("deadline")
    return contextlib.nullcontext() if deadline is None else deadline.hold()


class StreamSlots:
    """Counts open streams.

    Args:
        most: How many there may be; None for no limit.

    Attributes:
        num_open: How many there are.
    """

    def __init__(self, most: int | None):
        self._most = most
        self.num_open = 0

    def take(self, body: Any, holder: Any) -> None:
        """Take a slot for a request that asks for a stream, and note that in its state.

        Raises:
            TooManyStreamsError: There is none left.
        """
        if not getattr(body, "stream", None):
            return
        if self._most is not None and self.num_open >= self._most:
            raise TooManyStreamsError(
                f"{self.num_open} streams are open, which is all that this server allows; "
                "try again later"
            )
        self.num_open += 1
        holder.has_stream_slot = True

    def give_back(self, state: dict[str, Any]) -> None:
        """Free the slot that a request took, if it did."""
        self.num_open -= bool(state.pop("has_stream_slot", False))
