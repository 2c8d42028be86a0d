"""What hostile, broken and hurried clients do to a server; raw sockets, one coroutine per kind.

Each returns when it is done and raises `AssertionError` if the server did not answer as it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

READ_TIMEOUT_S = 60.0
LONG = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server under attack.

    Attributes:
        host: Its address.
        port: Its port.
        scale: 1 for `make abuse`, less for a test: how many clients, how large a body.
    """

    host: str
    port: int
    scale: float = 1.0

    def many(self, count: int) -> int:
        return max(2, round(self.scale * count))


class Client:
    """One connection. A context manager; leaving it closes, or resets if `reset`."""

    def __init__(self, target: Target, *, receive_buffer: int | None = None, reset: bool = False):
        self._target = target
        self._receive_buffer = receive_buffer
        self._reset = reset

    async def __aenter__(self) -> Client:
        sock = socket.socket()
        sock.setblocking(False)
        if self._receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        if self._reset:
            # Closing sends a reset instead of a goodbye.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, (self._target.host, self._target.port))
        except BaseException:
            sock.close()
            raise
        self.sock = sock
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def receive(self, most: int = 65536) -> bytes:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await asyncio.get_running_loop().sock_recv(self.sock, most)

    async def status(self) -> int:
        """Return the status of the response."""
        data = b""
        while b"\r\n" not in data:
            part = await self.receive()
            assert part, f"closed without an answer: {data!r}"
            data += part
        return int(data.split(b" ", 2)[1])


def request(body: bytes | dict[str, Any], length: int | None = None) -> bytes:
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (len(body) if length is None else length)
    ) + body


async def all_at_once(count: int, attack: Callable[[int], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for i in range(count):
            group.create_task(attack(i))


async def slow_readers(target: Target) -> None:
    """Ask for long streams and read nothing, or a byte now and then."""

    async def attack(i: int) -> None:
        async with Client(target, receive_buffer=4096) as client:
            await client.send(request({**LONG, "logprobs": 3}))
            with contextlib.suppress(ConnectionError):
                for _ in range(10):
                    if i % 2:
                        await client.receive(1)
                    await asyncio.sleep(0.1)

    await all_at_once(target.many(32), attack)


async def half_requests(target: Target) -> None:
    """Send half a request and wait, silent, for longer than anyone should."""
    whole = request({"prompt": "Hi", "max_tokens": 4})

    async def attack(i: int) -> None:
        cut = [0, 5, 60, len(whole) - 10][i % 4]
        async with Client(target, reset=i % 3 == 0) as client:
            await client.send(whole[:cut])
            await asyncio.sleep(2 * target.scale)

    await all_at_once(target.many(200), attack)


async def connects(target: Target) -> None:
    """Connect as often as a file descriptor limit allows, then leave, half of them with a reset."""

    async def attack(i: int) -> None:
        async with Client(target, reset=i % 2 == 0) as client:
            await asyncio.sleep(target.scale)
            if i % 50 == 0:
                with contextlib.suppress(ConnectionError):
                    await client.send(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                    data = await client.receive()
                    # Closed, if so many clients made this one too late for the server.
                    assert not data or b" 200 " in data, data

    await all_at_once(target.many(2000), attack)


async def huge_body(target: Target) -> None:
    """Send a body of a gigabyte, with its length declared and without."""
    piece = b"x" * 2**20
    num_pieces = target.many(1024)
    heads = (
        request(b"", length=num_pieces * len(piece)),
        request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"),
    )
    wraps = ((b"%b", b""), (b"100000\r\n%b\r\n", b"0\r\n\r\n"))
    for head, (wrap, end) in zip(heads, wraps, strict=True):
        async with Client(target) as client:
            await client.send(head)
            answer = asyncio.create_task(client.status())
            with contextlib.suppress(ConnectionError):
                for _ in range(num_pieces):
                    if answer.done():
                        break
                    await client.send(wrap % piece)
                await client.send(end)
            with contextlib.suppress(ConnectionError):
                assert await answer == 413


BAD_BODIES = (
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "Hi", "logit_bias": {"1": 1, "1": 2}}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "Hi", "temperature": NaN}',
    b'{"prompt": "Hi", "seed": ' + b"9" * 100_000 + b"}",
    b'{"prompt": "Hi", "n": 1e999}',
    b"\xff\xfe{",
    b"",
    b"null",
    b'{"prompt": ' + json.dumps(["x" * 100] * 20_000).encode() + b"}",
    b'{"prompt": "Hi", "x": [' + b"[]," * 1_100_000 + b"0]}",
    b'{"messages": 5, "prompt": {"a": [1, {"b": [[[]]]}]}}',
)


async def bad_bodies(target: Target) -> None:
    """Send what is no JSON, or JSON that means harm."""
    for body in BAD_BODIES:
        async with Client(target) as client:
            await client.send(request(body))
            status = await client.status()
            assert status == 400, f"{status} for {body[:60]!r}"


async def garbage(target: Target) -> None:
    """Send what is no HTTP."""
    noise = random.Random(0)
    for i in range(target.many(50)):
        async with Client(target, reset=i % 2 == 0) as client:
            with contextlib.suppress(ConnectionError):
                await client.send(noise.randbytes(200) + b"\r\n\r\n")
                await client.receive()


async def disconnects(target: Target) -> None:
    """Leave at every stage of a request, politely and not, with and without a stream."""
    stages: list[Callable[[Client, bytes], Awaitable[None]]] = []

    def stage(function: Callable[[Client, bytes], Awaitable[None]]) -> None:
        stages.append(function)

    @stage
    async def before_anything(client: Client, whole: bytes) -> None:
        pass

    @stage
    async def in_the_headers(client: Client, whole: bytes) -> None:
        await client.send(whole[:50])

    @stage
    async def after_the_headers(client: Client, whole: bytes) -> None:
        await client.send(whole[: whole.index(b"\r\n\r\n") + 4])

    @stage
    async def in_the_body(client: Client, whole: bytes) -> None:
        await client.send(whole[:-5])

    @stage
    async def at_once(client: Client, whole: bytes) -> None:
        await client.send(whole)

    @stage
    async def while_it_runs(client: Client, whole: bytes) -> None:
        await client.send(whole)
        await asyncio.sleep(0.05)

    @stage
    async def after_the_first_event(client: Client, whole: bytes) -> None:
        await client.send(whole)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.receive()

    @stage
    async def with_its_end_closed(client: Client, whole: bytes) -> None:
        await client.send(whole)
        client.sock.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.05)

    bodies = [
        {**LONG, "stream": stream, "n": n, "seed": 1} for stream in (True, False) for n in (1, 3)
    ]
    # A greedy request may have one sample only.
    wholes = [request({**body, "temperature": 1.0}) for body in bodies]

    async def attack(i: int) -> None:
        leave = stages[i % len(stages)]
        with contextlib.suppress(ConnectionError):
            async with Client(target, reset=i % 3 == 0) as client:
                await leave(client, wholes[i // len(stages) % len(wholes)])

    await all_at_once(max(target.many(160), len(stages) * len(wholes)), attack)


ATTACKS = (
    slow_readers, half_requests, connects, huge_body, bad_bodies, garbage, disconnects,
)  # fmt: skip
