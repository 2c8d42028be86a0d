"""Connections between the leading process and those that follow, and who of them is still there.

The leader sends; followers answer each message with one byte once they have carried it out. So an
end of the connection tells of a process that died, and an answer that stays out of one that hangs.
Within `timeout_s` either side knows, and gives up: nobody goes on without the others.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, HostLostError
from jaxinfer.hosts.messages import Decoder, Encoder, Message

logger = logging.getLogger(__name__)

PING, STOP = "ping", "stop"
PINGS_PER_TIMEOUT = 4
CONNECT_TIMEOUT_S = 60.0
# A program that is compiled on first use keeps everybody waiting.
COMPILING_FACTOR = 10
_ANSWER = b"\x06"
_SECRET_WORDS = 4


def join(config: EngineConfig) -> Leader | Follower:
    """Meet the other processes, and return this one's side of the channel.

    Has to come before anything touches a device. Waits for all of them.

    Raises:
        ConfigError: The settings do not go together, or with the devices of all hosts.
    """
    check_hosts(config)
    # A process that is lost must not take this one with it: there are requests to be answered.
    jax.config.update("jax_enable_recoverability", True)
    # It would take SIGTERM away from the server, which drains on it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(config.coordinator_address, config.num_hosts, config.host_rank)
    if jax.device_count() != config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} must be the number of all "
            f"devices, {jax.device_count()} on {config.num_hosts} hosts: each host holds a part "
            "of the model"
        )
    assert config.coordinator_address, "checked by the config"
    host = config.coordinator_address.rsplit(":", 1)[0].strip("[]")
    if config.host_rank:
        port, *secret = multihost_utils.broadcast_one_to_all(_words()).tolist()
        return Follower(host, port, bytes(np.array(secret, np.uint32)), config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        words = _words(listener.getsockname()[1], np.frombuffer(secrets.token_bytes(16), np.uint32))
        multihost_utils.broadcast_one_to_all(words)
        return Leader(listener, bytes(words[1:]), config.num_hosts - 1, _timeout_s(config))


def _timeout_s(config: EngineConfig) -> float:
    return config.host_timeout_s * (1 if config.warmup else COMPILING_FACTOR)


def check_hosts(config: EngineConfig) -> None:
    """Refuse settings of hosts that do not go together.

    Raises:
        ConfigError: Says which.
    """
    if config.host_rank >= config.num_hosts:
        raise ConfigError(
            f"host_rank must lie in [0, num_hosts), got {config.host_rank} of {config.num_hosts}"
        )
    if ":" not in (config.coordinator_address or ""):
        raise ConfigError(
            f"num_hosts={config.num_hosts} needs coordinator_address, HOST:PORT of host 0, got "
            f"{config.coordinator_address!r}"
        )
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} on num_hosts={config.num_hosts} is "
            "not supported: start one such group for each replica, and a router in front"
        )


def _words(port: int = 0, secret: np.ndarray | None = None) -> np.ndarray:
    words = np.zeros(1 + _SECRET_WORDS, np.uint32)
    words[0] = port
    if secret is not None:
        words[1:] = secret
    return words


class Leader:
    """The leading process's side.

    Args:
        listener: Where followers connect.
        secret: What they have to say first, 16 bytes; it reached them through the devices.
        num_followers: Waited for.
        timeout_s: An answer that stays out for longer means that a host hangs.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, num_followers: int, timeout_s: float
    ):
        self.timeout_s = timeout_s
        self.lost: HostLostError | None = None
        self._changed = threading.Condition()  # guards what is known of the followers
        self._sending = threading.Lock()
        self._encoder = Encoder()
        self._closed = threading.Event()
        self._followers: list[_Peer] = []
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while len(self._followers) < num_followers:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            connection, address = listener.accept()
            connection.settimeout(timeout_s)
            try:
                known = secrets.compare_digest(_read(connection, len(secret) + 4)[4:], secret)
            except OSError:
                known = False
            if not known:
                logger.warning("%s is none of the hosts", address[0])
                connection.close()
                continue
            self._followers.append(_Peer(connection, f"{address[0]}:{address[1]}"))
        for i, peer in enumerate(self._followers):
            threading.Thread(
                target=self._listen, args=(peer,), name=f"jaxinfer-host-{i}", daemon=True
            ).start()
        threading.Thread(target=self._watch, name="jaxinfer-hosts", daemon=True).start()

    def send(self, message: Message) -> None:
        """Tell all followers; does not wait for their answers.

        Raises:
            HostLostError: One of them is gone.
        """
        self.check()
        with self._sending:
            data = self._encoder.encode(message)
            for peer in self._followers:
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
                peer.ready = True
        self.check()

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
        """Count a follower's answers until it closes the connection."""
        while answers := _answers(peer.connection):
            with self._changed:
                for _ in answers:
                    peer.unanswered.popleft()
                peer.last_answer = time.monotonic()
                self._changed.notify_all()
        self.lose(f"the host at {peer.address} has ended")
        peer.connection.close()

    def _watch(self) -> None:
        """Ask now and then whether everybody is there, and notice who is not."""
        while not self._closed.wait(self.timeout_s / PINGS_PER_TIMEOUT) and self.lost is None:
            now = time.monotonic()
            with self._changed:
                silent = [peer for peer in self._followers if peer.silent_s(now) > self.timeout_s]
            if silent:
                self.lose(
                    f"the host at {silent[0].address} hangs: no answer for {self.timeout_s:g} s"
                )
                return
            try:
                self.send(Message(PING))
            except HostLostError:
                return


class _Peer:
    """What the leader knows of a follower."""

    def __init__(self, connection: socket.socket, address: str):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.address = address
        self.unanswered: deque[float] = deque()  # when each was sent
        self.last_answer = time.monotonic()
        self.ready = False  # while it loads and compiles, it may be silent

    def silent_s(self, now: float) -> float:
        if not self.unanswered or not self.ready:
            return 0.0
        return now - max(self.unanswered[0], self.last_answer)


class Follower:
    """A following process's side.

    Args:
        host: The leader's.
        port: The leader's.
        secret: See `Leader`.
        config: This process's settings.
    """

    def __init__(self, host: str, port: int, secret: bytes, config: EngineConfig):
        self.config = config
        self._connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(config.host_rank.to_bytes(4, "little") + secret)
        self._decoder = Decoder(lambda num_bytes: _read(self._connection, num_bytes))
        self._connection.settimeout(None)

    def receive(self) -> Message:
        """Return the next message.

        Raises:
            HostLostError: The leader ended, or has been silent for too long.
        """
        try:
            return self._decoder.decode()
        except TimeoutError:
            why = f"has been silent for {_timeout_s(self.config):g} s"
        except OSError as error:
            why = f"has ended ({error})"
        raise HostLostError(f"host 0 {why}; start all hosts again")

    def expect_pings(self) -> None:
        """From now on silence means that the leader hangs."""
        self._connection.settimeout(_timeout_s(self.config))

    def answer(self) -> None:
        """Say that a message was carried out; a leader that is gone is noticed elsewhere."""
        _try(lambda: self._connection.sendall(_ANSWER))

    def close(self) -> None:
        """Leave. A second call is harmless."""
        self._connection.close()


def _answers(connection: socket.socket) -> bytes:
    """Return what a follower has answered, b"" once it is gone. Silence is noticed elsewhere."""
    while True:
        try:
            return connection.recv(4096)
        except TimeoutError:
            continue
        except OSError:
            return b""


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = connection.recv(min(num_bytes, 2**20))
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
