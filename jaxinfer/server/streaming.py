"""Server-sent events, and what happens when the client goes away. Knows no endpoint.

uvicorn drops what is sent to a closed connection without a word, so both kinds of response listen
for the disconnect themselves and cancel the work behind them; closing an engine stream aborts its
request before the next step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.server.errors import error_reply, log_error

DONE = b"data: [DONE]\n\n"

# Proxies must pass events on as they come (nginx reads the third).
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(chunk: BaseModel, *, exclude_unset: bool = False) -> bytes:
    """Return one whole event: written at once, so that no reader sees half a character."""
    return b"data: " + chunk.model_dump_json(exclude_unset=exclude_unset).encode() + b"\n\n"


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


async def stream_response(receive: Receive, events: AsyncGenerator[bytes]) -> Response:
    """Return the streaming response, once there is a first event.

    Waiting for it lets everything that can fail before the first token be a clean HTTP status.

    Raises:
        ClientDisconnect: The client left before.
        Exception: What `events` raises before its first event.
    """
    try:
        first = await until_disconnect(receive, _next(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


class EventStream(Response):
    """A response of server-sent events that ends with `[DONE]`, also after an error event.

    Args:
        first: The first event.
        events: The others; closed when the stream ends, for whatever reason.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]):
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(_HEADERS)
        # `init_headers` counts the empty body.
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; on a disconnect stop and close the events."""
        request_id = scope.get("state", {}).get("request_id")
        try:
            await until_disconnect(receive, self._send(send, request_id))
        except ClientDisconnect:
            # Nobody is left to tell; the request's own line in the log says that it was aborted.
            scope.setdefault("state", {})["disconnected"] = True
        finally:
            await self._events.aclose()

    async def _send(self, send: Send, request_id: str | None) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        await _write(send, self._first)
        try:
            async with aclosing(self._events) as events:
                async for item in events:
                    await _write(send, item)
        except Exception as error:
            log_error(error, request_id)
            body = json.dumps(error_reply(error).body(), ensure_ascii=False)
            await _write(send, f"data: {body}\n\n".encode())
        await _write(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _next(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
