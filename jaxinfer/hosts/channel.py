"""Connections between the leading process and those that follow, and who of them is still there.

The leader sends; followers answer each message with one byte once they have carried it out, and a
ping at once, whatever their devices do. So an end of the connection tells of a process that died,
and silence of one that hangs. Within `timeout_s` either side knows, and gives up: nobody goes on
without the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from jaxinfer.errors import ConfigError, HostLostError
from jaxinfer.hosts.messages import Decoder, Encoder, Message

logger = logging.getLogger(__name__)

PING, STOP, WELCOME, REFUSED = "ping", "stop", "welcome", "refused"
PINGS_PER_TIMEOUT = 4
CONNECT_TIMEOUT_S = 60.0
# Reading weights and compiling may keep a process from everything else for a while.
LOADING_FACTOR = 10
EXIT_LEADER_LOST = 1
SECRET_BYTES = 16
_HELLO = struct.Struct("<I")
_DONE, _HERE, _FAILED = b"\x06", b"\x05", b"\x15"
_LENGTH = struct.Struct("<I")


class Leader:
    """The leading process's side.

    Args:
        listener: Where followers connect.
        secret: What they have to say first, behind their rank: 16 bytes.
        num_followers: Waited for.
        timeout_s: A host that is silent for longer hangs.
        call_timeout_s: So does one whose devices take longer for a call; None for the same.
        welcome: What each follower is told first.

    Raises:
        HostLostError: Somebody does not come.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        num_followers: int,
        timeout_s: float,
        *,
        call_timeout_s: float | None = None,
        welcome: str = "",
    ):
        self.timeout_s = timeout_s
        self.call_timeout_s = timeout_s if call_timeout_s is None else call_timeout_s
        self.lost: HostLostError | None = None
        self._changed = threading.Condition()  # guards what is known of the followers
        self._sending = threading.Lock()
        self._encoder = Encoder()
        self._closed = threading.Event()
        self._followers: list[_Peer] = []
        self._admit(listener, secret, num_followers)
        for i, peer in enumerate(self._followers):
            threading.Thread(
                target=self._listen, args=(peer,), name=f"jaxinfer-host-{i}", daemon=True
            ).start()
        self.send(Message(WELCOME, text=welcome))
        threading.Thread(target=self._watch, name="jaxinfer-hosts", daemon=True).start()

    def _admit(self, listener: socket.socket, secret: bytes, num_followers: int) -> None:
        """Wait for the followers, one of each rank; show out whoever is none."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        ranks: set[int] = set()
        while len(ranks) < num_followers:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, address = listener.accept()
            except TimeoutError:
                raise HostLostError(
                    f"{num_followers - len(ranks)} of {num_followers} other hosts did not connect "
                    f"within {CONNECT_TIMEOUT_S:g} s; start all hosts again"
                ) from None
            connection.settimeout(self.timeout_s)
            try:
                hello = _patiently(connection, _HELLO.size + len(secret), _give_up)
                known = secrets.compare_digest(hello[_HELLO.size :], secret)
            except OSError:
                hello, known = b"", False
            if not known:
                logger.warning("%s is none of the hosts", address[0])
                connection.close()
                continue
            (rank,) = _HELLO.unpack(hello[: _HELLO.size])
            if rank in ranks:
                why = f"host_rank {rank} is here already: give each host a rank of its own"
                logger.warning("%s: %s", address[0], why)
                answer = Encoder().encode(Message(REFUSED, text=why))
                _try(lambda c=connection, data=answer: c.sendall(data))
                connection.close()
                continue
            ranks.add(rank)
            self._followers.append(_Peer(connection, f"{address[0]}:{address[1]}"))

    def send(self, message: Message) -> None:
        """Tell all followers; does not wait for their answers.

        Raises:
            HostLostError: One of them is gone.
        """
        self.check()
        with self._sending:
            data = self._encoder.encode(message)
            for peer in self._followers:
                if message.word not in (PING, WELCOME):
                    with self._changed:
                        peer.unanswered.append(time.monotonic())
                try:
                    peer.connection.sendall(data)
                except OSError as error:
                    self.lose(f"the host at {peer.address} takes no messages: {error}")
        self.check()

    def wait_ready(self) -> None:
        """Wait until every follower has carried out all that it was told, however long.

        Raises:
            HostLostError: One of them ended instead.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.lost or not any(peer.unanswered for peer in self._followers)
            )
            for peer in self._followers:
                peer.ready, peer.last_answer = True, time.monotonic()
        self.check()

    def watched[Result](self, call: Callable[[], Result]) -> Result:
        """Return what the call returns, unless a host is lost first: the call is then left behind.

        For calls that wait for all hosts inside XLA, where nothing interrupts them.

        Raises:
            HostLostError: A host is lost.
        """
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # raised where it is waited for
                future.set_exception(error)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=run, name="jaxinfer-watched", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self.lost or future.done())
        if self.lost is not None:
            # jax would wait at the end for those who never come. Registered last, called first.
            atexit.register(os._exit, 1)
            self.check()
        return future.result()

    def check(self) -> None:
        """Raise `HostLostError` if somebody is missing."""
        if self.lost is not None:
            # Each one that hears of it gets an error of its own, with a trace of its own.
            raise HostLostError(str(self.lost))

    def lose(self, why: str) -> None:
        """Give up: somebody is missing, for this reason. The first one counts."""
        with self._changed:
            if self.lost is not None or self._closed.is_set():
                return
            self.lost = HostLostError(f"{why}; start all hosts again")
            self._changed.notify_all()
        logger.critical("%s", self.lost)

    def close(self) -> None:
        """Let the followers go. A second call is harmless."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self.lost is None:
            with self._sending:
                data = self._encoder.encode(Message(STOP))
                for peer in self._followers:
                    with self._changed:
                        peer.unanswered.append(time.monotonic())
                    _try(lambda peer=peer: peer.connection.sendall(data))
        for peer in self._followers:
            _try(lambda peer=peer: peer.connection.shutdown(socket.SHUT_WR))

    def _listen(self, peer: _Peer) -> None:
        """Take a follower's answers until it closes the connection."""
        why = "has ended"
        try:
            while why == "has ended":
                answer = _patiently(peer.connection, 1)
                with self._changed:
                    peer.last_answer = time.monotonic()
                    if answer == _DONE:
                        peer.unanswered.popleft()
                        self._changed.notify_all()
                if answer == _FAILED:
                    (length,) = _LENGTH.unpack(_patiently(peer.connection, _LENGTH.size))
                    words = _patiently(peer.connection, length).decode("utf-8", "replace")
                    why = f"cannot go on: {words}"
        except OSError:
            pass
        self.lose(f"the host at {peer.address} {why}")
        peer.connection.close()

    def _watch(self) -> None:
        """Ask now and then whether everybody is there, and notice who is not."""
        while not self._closed.wait(self.timeout_s / PINGS_PER_TIMEOUT) and self.lost is None:
            now = time.monotonic()
            with self._changed:
                late = [(peer, self._late(peer, now)) for peer in self._followers]
            for peer, seconds in late:
                if seconds is not None:
                    self.lose(f"the host at {peer.address} hangs: no answer for {seconds:g} s")
                    return
            try:
                self.send(Message(PING))
            except HostLostError:
                return

    def _late(self, peer: _Peer, now: float) -> float | None:
        """Return for how long a peer that hangs has given no answer, None if it does not hang."""
        patience = self.timeout_s * (1 if peer.ready else LOADING_FACTOR)
        if now - peer.last_answer > patience:
            return patience
        if peer.ready and peer.unanswered and now - peer.unanswered[0] > self.call_timeout_s:
            return self.call_timeout_s
        return None


class _Peer:
    """What the leader knows of a follower."""

    def __init__(self, connection: socket.socket, address: str):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.address = address
        self.unanswered: deque[float] = deque()  # when each was sent
        self.last_answer = time.monotonic()
        self.ready = False  # while it loads and compiles, it may be silent


class Follower:
    """A following process's side.

    Args:
        host: The leader's.
        port: The leader's.
        secret: See `Leader`.
        rank: This process's number.
        timeout_s: A leader that is silent for longer hangs.

    Raises:
        ConfigError: The leader takes nobody, or not this one.
    """

    def __init__(self, host: str, port: int, secret: bytes, rank: int, timeout_s: float):
        self.timeout_s = timeout_s
        try:
            self._connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        except OSError as error:
            raise ConfigError(
                f"host 0 takes no more hosts ({error}): is host_rank={rank} started twice, or "
                f"port {port} of {host} closed to this host?"
            ) from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = Decoder(self._read)
        self._patience_s = CONNECT_TIMEOUT_S
        self._sending = threading.Lock()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._send(_HELLO.pack(rank) + secret)
        first = self.receive()
        if first.word != WELCOME:
            self._connection.close()
            raise ConfigError(f"host 0 refuses this one: {first.text}")
        self.welcome = first.text

    def receive(self) -> Message:
        """Return the next message that is no ping; pings are answered.

        Raises:
            HostLostError: The leader ended, or has been silent for too long.
        """
        try:
            while (message := self._decoder.decode()).word == PING:
                self._send(_HERE)
            return message
        except TimeoutError:
            why = f"has been silent for {self._patience_s:g} s"
        except OSError as error:
            why = f"has ended ({error})"
        raise HostLostError(f"host 0 {why}; start all hosts again")

    def listen(self, on_lost: Callable[[HostLostError], object] | None = None) -> None:
        """From now on receive in a thread, so that pings are answered whatever else is done.

        Args:
            on_lost: Called if the leader is lost; None ends the process, for the call under way may
                never come back.
        """
        self._patience_s = self.timeout_s * LOADING_FACTOR
        threading.Thread(
            target=self._listen, args=(on_lost or _end,), name="jaxinfer-leader", daemon=True
        ).start()

    def next(self) -> Message:
        """Return the next message that the thread received."""
        return self._messages.get()

    def expect_pings(self) -> None:
        """From now on silence means that the leader hangs: it has loaded."""
        self._patience_s = self.timeout_s

    def answer(self) -> None:
        """Say that a message was carried out; a leader that is gone is noticed elsewhere."""
        self._send(_DONE)

    def fail(self, why: str) -> None:
        """Say why this process cannot go on."""
        words = why.encode()
        self._send(_FAILED + _LENGTH.pack(len(words)) + words)

    def close(self) -> None:
        """Leave. A second call is harmless."""
        self._connection.close()

    def _send(self, data: bytes) -> None:
        with self._sending:
            _try(lambda: self._connection.sendall(data))

    def _read(self, num_bytes: int) -> bytes:
        """Return so many bytes.

        Raises:
            OSError: The connection was closed, or silent for too long.
        """
        # Looks up now and then, for patience may change while it waits.
        self._connection.settimeout(self.timeout_s / PINGS_PER_TIMEOUT)
        last = time.monotonic()

        def wait_on() -> None:
            if time.monotonic() - last > self._patience_s:
                raise TimeoutError

        return _patiently(self._connection, num_bytes, wait_on)

    def _listen(self, on_lost: Callable[[HostLostError], object]) -> None:
        while True:
            try:
                message = self.receive()
            except HostLostError as error:
                on_lost(error)
                return
            self._messages.put(message)
            if message.word == STOP:
                return


def _give_up() -> None:
    raise TimeoutError


def _end(error: HostLostError) -> None:
    logger.critical("%s", error)
    os._exit(EXIT_LEADER_LOST)


def _patiently(
    connection: socket.socket, num_bytes: int, on_silence: Callable[[], None] = lambda: None
) -> bytes:
    """Return so many bytes; whether silence lasts too long is decided elsewhere.

    Raises:
        OSError: The connection was closed; or what `on_silence` raises.
    """
    parts = []
    while num_bytes:
        try:
            part = connection.recv(min(num_bytes, 2**20))
        except TimeoutError:
            on_silence()
            continue
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _try(action: Callable[[], object]) -> None:
    try:
        action()
    except OSError as error:
        logger.debug("%s", error)
