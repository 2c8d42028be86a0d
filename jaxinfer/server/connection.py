"""One client's connection: uvicorn's, with an end to every wait for a client.

uvicorn waits for ever for a client that connects and says nothing, sends half a request, or leaves
its answer unread, and for one that has vanished without a word. Each holds a file descriptor, the
last two a request as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import socket
import struct
import sys
import termios
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jaxinfer.server.errors import ErrorReply

# A peer that vanished is noticed after a minute: 30 s of silence, then three probes.
KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Connection(H11Protocol):
    """Set `receive_timeout_s` and `send_timeout_s` in a subclass; see `connection_class`."""

    receive_timeout_s: float
    send_timeout_s: float

    def __init__(self, config: Config, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._num_unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start to wait for a request."""
        super().connection_made(transport)
        # Tell of what the kernel does not take at once: it is a client that does not read. Not 0,
        # at which asyncio's TLS pauses for ever.
        transport.set_write_buffer_limits(high=1, low=0)
        _probe_when_silent(transport)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop(self._receiving)
        self._stop(self._sending)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        was_sending_body = self.conn.their_state is h11.SEND_BODY
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY:
            # Each part of a body gets its own time; of headers, all together.
            self._wait_for_request(again=True)
        elif self.conn.their_state is h11.IDLE:
            self._wait_for_request(again=was_sending_body)
        else:
            self._stop(self._receiving)
            self._receiving = None

    def pause_writing(self) -> None:
        """Start to wait for the client to read."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        self._stop(self._sending)
        self._sending = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the words of all other refusals."""
        if self.conn.our_state is not h11.IDLE and self.conn.our_state is not h11.SEND_RESPONSE:
            # In the middle of an answer there is no way to say it.
            self.transport.close()
            return
        error = sys.exception()
        hint = getattr(error, "error_status_hint", 400)
        if hint == 431:
            most = self.config.h11_max_incomplete_event_size
            msg = f"The request line and headers may have {most} bytes"
        reply = ErrorReply(status=hint if hint in (431, 501) else 400, message=msg)
        body = json.dumps(reply.body()).encode()
        response = h11.Response(
            status_code=reply.status,
            headers=[
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ],
            reason=STATUS_PHRASES[reply.status],
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_request(self, *, again: bool = False) -> None:
        if self._receiving is not None and not again:
            return
        self._stop(self._receiving)
        self._receiving = self.loop.call_later(self.receive_timeout_s, self._nothing_came)

    def _nothing_came(self) -> None:
        self._receiving = None
        if self.flow.read_paused:
            # It is we who do not read: the application is behind.
            self._wait_for_request()
        elif self.timeout_keep_alive_task is None:
            self._give_up()

    def _wait_for_reader(self) -> None:
        self._stop(self._sending)
        self._num_unread = _num_unread(self.transport)
        self._sending = self.loop.call_later(self.send_timeout_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if _num_unread(self.transport) < self._num_unread:
            self._wait_for_reader()  # it reads, if slowly
        else:
            self._give_up()

    def _give_up(self) -> None:
        # Not `close`, which would wait until the client has read what it does not read.
        self.transport.abort()

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def connection_class(receive_timeout_s: float, send_timeout_s: float) -> type[Connection]:
    """Return the class of a server's connections: uvicorn makes them, and passes no settings on."""
    limits = {"receive_timeout_s": receive_timeout_s, "send_timeout_s": send_timeout_s}
    return type("Connection", (Connection,), limits)


def _num_unread(transport: asyncio.Transport) -> int:
    """Return the bytes that the peer has not taken yet: those here, and those in the kernel.

    The kernel asks for more only when much of its buffer is free, which may hold megabytes: a peer
    that reads slowly looks like one that does not read if only the bytes here are counted.
    """
    size = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):  # where the system cannot tell
        [in_kernel] = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))
        size += in_kernel
    return size


def _probe_when_silent(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_PROBES.items():
        if hasattr(socket, name):  # other systems have other names, or none
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
