"""Server-sent events, and what happens when the client goes away. Knows no endpoint.

uvicorn drops what is sent to a closed connection without a word, so both kinds of response listen
for the disconnect themselves and cancel the work behind them; closing an engine stream aborts its
request before the next step.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.server.errors import error_reply, log_error
from jaxinfer.server.limits import hold_deadline

DONE = b"data: [DONE]\n\n"
# A comment: every reader of events skips it, and every proxy sees that the connection lives.
PING = b": ping\n\n"

# Proxies must pass events on as they come (nginx reads the third).
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Framing:
    """How a dialect ends a stream: OpenAI's, and the base of the others.

    Attributes:
        end: Sent last, also after an error.
    """

    end: bytes = DONE

    def error(self, error: Exception) -> bytes:
        """Return the event that tells of an error after the 200."""
        body = json.dumps(error_reply(error).body(), ensure_ascii=False)
        return f"data: {body}\n\n".encode()


OPENAI = Framing()


def event(
    chunk: BaseModel, *, exclude_unset: bool = False, name: str = "", **options: Any
) -> bytes:
    """Return one whole event: written at once, so that no reader sees half a character."""
    data = chunk.model_dump_json(exclude_unset=exclude_unset, **options).encode()
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it when the client leaves first.

    Raises:
        ClientDisconnect: The client left; `work` has been cancelled and has cleaned up.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def stream_response(
    receive: Receive,
    events: AsyncGenerator[bytes],
    *,
    ping_interval_s: float | None = None,
    framing: Framing = OPENAI,
) -> Response:
    """Return the streaming response, once there is a first event or it is time for a ping.

    Waiting for the first event lets everything that can fail before it be a clean HTTP status.

    Args:
        receive: Tells when the client leaves.
        events: Closed in the end, whatever happens.
        ping_interval_s: Silence after which a comment is sent; None for never.
        framing: How the dialect ends a stream.

    Raises:
        ClientDisconnect: The client left before.
        Exception: What `events` raises before its first event.
    """
    first = asyncio.create_task(_next(events))
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait(
            {first, gone}, timeout=ping_interval_s, return_when=asyncio.FIRST_COMPLETED
        )
        if gone.done() and not first.done():
            raise ClientDisconnect
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        raise
    finally:
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    return EventStream(first, events, ping_interval_s, framing)


class EventStream(Response):
    """A response of server-sent events with an end that its dialect knows, also after an error.

    Args:
        first: Waits for the first event, or has it.
        events: The others; closed when the stream ends, for whatever reason.
        ping_interval_s: Silence after which a comment is sent; None for never.
        framing: How the dialect ends a stream.
    """

    def __init__(
        self,
        first: asyncio.Task[bytes],
        events: AsyncGenerator[bytes],
        ping_interval_s: float | None,
        framing: Framing,
    ):
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(_HEADERS)
        # `init_headers` counts the empty body.
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        self._first = first
        self._events = events
        self._intervals = [] if ping_interval_s is None else [ping_interval_s]
        self._framing = framing
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; on a disconnect stop and close the events."""
        try:
            await until_disconnect(receive, self._send(send, scope.setdefault("state", {})))
        except ClientDisconnect:
            # Nobody is left to tell; the request's own line in the log says that it was aborted.
            scope["state"]["disconnected"] = True
        finally:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
            await self._events.aclose()

    async def _send(self, send: Send, state: dict[str, Any]) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        if not self._first.done():
            await self._write(send, PING)
        pinging = [asyncio.create_task(self._ping(send, s)) for s in self._intervals]
        try:
            async with hold_deadline(state), aclosing(self._events) as events:
                await self._write(send, await self._first)
                async for item in events:
                    await self._write(send, item)
        except Exception as error:
            log_error(error, state.get("request_id"))
            await self._write(send, self._framing.error(error))
        finally:
            for task in pinging:
                task.cancel()
            await asyncio.gather(*pinging, return_exceptions=True)
        if self._framing.end:
            await self._write(send, self._framing.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._last_write = time.monotonic()

    async def _ping(self, send: Send, interval_s: float) -> None:
        """Break silences. A task of its own, so that an event costs nothing for it."""
        while True:
            silent_s = time.monotonic() - self._last_write
            if silent_s < interval_s:
                await asyncio.sleep(interval_s - silent_s)
            else:
                await self._write(send, PING)


async def _next(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
