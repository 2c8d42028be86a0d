"""Starts the server: open the port, load the model behind it, drain on a signal.

The port opens first and answers 503 while the model loads, so that a supervisor sees a live process
and a client a clear word instead of a refused connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, HostLostError, JaxinferError
from jaxinfer.server.access_log import configure_logging
from jaxinfer.server.app import create_app
from jaxinfer.server.connection import connection_class
from jaxinfer.server.listener import BACKLOG, listen, remove_unix_socket, tls_settings, url_of
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.state import ServerState

if TYPE_CHECKING:
    from jaxinfer.loading import LoadedModel

type Load = Callable[[EngineConfig], LoadedModel | Sequence[LoadedModel]]

logger = logging.getLogger("jaxinfer.server")

EXIT_LOAD_FAILED = 2
EXIT_FORCED = 130
# What requests that were cut at the end of draining have to tell their clients so.
LAST_WORDS_S = 2
# asyncio takes as many connections at one go as its backlog says, while every stream waits.
ACCEPTS_AT_ONCE = 64
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    config: EngineConfig,
    options: ServerOptions | None = None,
    *,
    load: Load | None = None,
) -> None:
    """Serve until a signal comes: SIGINT or SIGTERM drains, a second one ends at once.

    On all hosts of a model but the first: hold its part, without a port, as long as that one does.

    Args:
        config: What to load.
        options: Settings of the HTTP side.
        load: Loads the model, once or once a replica; None for `jaxinfer.loading`.

    Raises:
        SystemExit: With code 2 if the port cannot be opened or the model cannot be loaded.
    """
    options = options or ServerOptions()
    configure_logging(options.log_level, options.log_format)
    if config.host_rank:
        _follow(config)
        return
    _allow_many_connections()
    try:
        state = ServerState(options)
        server = make_server(state)
        listener = listen(options)
    except ConfigError as error:
        sys.stderr.write(f"jaxinfer: {error}\n")
        raise SystemExit(EXIT_LOAD_FAILED) from None
    url = url_of(listener, options)
    logger.info("listening on %s, loading the model", options.uds or url)
    _warn_if_open_to_all(options)
    loading = _Loading(load or _load, config, state, server, url)
    loading.start()
    try:
        server.run(sockets=[listener])
    finally:
        remove_unix_socket(options)
    _finish(state, loading)


def make_server(state: ServerState) -> Server:
    """Return the server of a state, which listens on nothing yet.

    Raises:
        ConfigError: Keys or certificates cannot be read.
    """
    options = state.options
    settings: dict[str, Any] = tls_settings(options)
    return Server(
        uvicorn.Config(
            create_app(state),
            http=connection_class(options.receive_timeout_s, options.send_timeout_s),
            h11_max_incomplete_event_size=options.max_header_bytes,
            timeout_keep_alive=options.keep_alive_timeout_s,  # pyrefly: ignore[bad-argument-type]
            timeout_graceful_shutdown=LAST_WORDS_S,
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=ACCEPTS_AT_ONCE,
            server_header=False,
            ws="none",
            **settings,
        ),
        state,
    )


class Server(uvicorn.Server):
    """uvicorn with our word on signals and on draining.

    It listens on while it drains, so that probes and new clients get an answer: 503.

    Args:
        config: uvicorn's settings.
        state: Told when draining begins.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState):
        super().__init__(config)
        self._state = state
        self._stopping = False
        self._drained_by: float | None = None

    def stop(self) -> None:
        """Drain and end. Callable from any thread."""
        self._state.drain()
        self._stopping = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, a few at a time, however many wait."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Return whether it is time to end; called ten times a second."""
        if await super().on_tick(counter):
            return True
        if not self._stopping:
            return False
        if self._drained_by is None:
            self._drained_by = time.monotonic() + self._state.options.drain_timeout_s
        if self._state.num_in_flight == 0:
            return True
        if time.monotonic() < self._drained_by:
            return False
        logger.warning("%d requests are cut: the time is over", self._state.num_in_flight)
        self._state.deadlines.expire()
        return True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle signals while the server runs; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self._state.draining:
            remove_unix_socket(self._state.options)
            _exit_now(EXIT_FORCED)
        # First the flag: the second signal may come while the line below is being written.
        self.stop()
        logger.info("%s: draining; a second signal ends at once", signal.Signals(sig).name)


class _Loading(threading.Thread):
    """Loads the model while the port already answers."""

    def __init__(
        self,
        load: Load,
        config: EngineConfig,
        state: ServerState,
        server: Server,
        url: str,
    ):
        super().__init__(name="jaxinfer-load", daemon=True)
        self.error: BaseException | None = None
        self._load, self._config = load, config
        self._state, self._server, self._url = state, server, url

    def run(self) -> None:
        try:
            self._state.serve(self._load(self._config))
            model, _ = self._state.require_model()
        except BaseException as error:  # whatever it is, the process must not stay half alive
            self.error = None if self._state.draining else error
            self._server.stop()
            return
        sys.stdout.write(_ready_text(self._url, model.name, self._state.options))
        sys.stdout.flush()


def _load(config: EngineConfig) -> LoadedModel | Sequence[LoadedModel]:
    from jaxinfer import loading  # checkpoints and models come in here, behind the open port

    if config.data_parallel_size > 1:
        return loading.load_replicas(config, progress=True)
    return loading.load(config, progress=True)


def _follow(config: EngineConfig) -> None:
    """Follow host 0 until it ends. A first signal is left to it: it has requests to drain."""
    from jaxinfer import loading

    def handle(number: int, frame: FrameType | None) -> None:
        logger.info("%s: waiting for host 0 to end", signal.Signals(number).name)
        for each in _SIGNALS:
            signal.signal(each, lambda *_: _exit_now(EXIT_FORCED))

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        loading.follow(config)
    except Exception as error:
        _report_load_failure(error)
        _exit_now(EXIT_LOAD_FAILED)
    # Not as jax would: it calls host 0 to take leave, and aborts if that one is gone already.
    _exit_now(0)


def _allow_many_connections() -> None:
    """Raise the limit of open files, often 1,024, to what the system grants this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems grant less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _warn_if_open_to_all(options: ServerOptions) -> None:
    if options.uds is not None or options.keys() or options.ssl_ca_certs:
        return
    with contextlib.suppress(ValueError):  # a name; it may be anything
        if not ipaddress.ip_address(options.host).is_loopback:
            logger.warning(
                "no API key is set: whoever reaches %s can use this server", options.host
            )


def _ready_text(url: str, model: str, options: ServerOptions) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    flags = f" --unix-socket {options.uds}" if options.uds else ""
    key = "  -H 'Authorization: Bearer KEY' \\\n" if options.keys() else ""
    return (
        f"\n{model} is ready at {url}/v1\n\n"
        f"curl{flags} {url}/v1/chat/completions \\\n"
        f"{key}"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}'\n\n"
    )


def _finish(state: ServerState, loading: _Loading) -> None:
    """Stop the engine and end the process with the right code."""
    if loading.error is not None:
        _report_load_failure(loading.error)
        if isinstance(loading.error, HostLostError):
            _exit_now(EXIT_LOAD_FAILED)  # what waits for the lost host waits for ever
        raise SystemExit(EXIT_LOAD_FAILED)
    if loading.is_alive():
        _exit_now(0)
    state.close()


def _exit_now(code: int) -> NoReturn:
    """End without waiting: a thread inside the compiler or device runtime cannot be interrupted."""
    os._exit(code)


def _report_load_failure(error: BaseException) -> None:
    from checkpoints import CheckpointError

    # Errors made for users say what to do; anything else is a defect and needs its traceback.
    if not isinstance(error, JaxinferError | CheckpointError | OSError):
        logger.error("loading failed", exc_info=error)
    sys.stderr.write(f"jaxinfer: the model cannot be loaded: {error}\n")
