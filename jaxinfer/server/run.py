"""Starts the server: open the port, load the model behind it, drain on a signal.

The port opens first and answers 503 while the model loads, so that a supervisor sees a live process
and a client a clear word instead of a refused connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvicorn

from jaxinfer.config import EngineConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.server.app import create_app
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.state import ServerState

if TYPE_CHECKING:
    from jaxinfer.loading import LoadedModel

logger = logging.getLogger("jaxinfer.server")

BACKLOG = 2048
EXIT_LOAD_FAILED = 2
EXIT_FORCED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "info",
    access_log: bool = True,
    options: ServerOptions | None = None,
    load: Callable[[EngineConfig], LoadedModel] | None = None,
) -> None:
    """Serve until a signal comes: SIGINT or SIGTERM drains, a second one ends at once.

    Args:
        config: What to load.
        host: Address to listen on.
        port: 0 takes a free one.
        log_level: "debug", "info", "warning" or "error".
        access_log: One line per response.
        options: Settings of the HTTP side.
        load: Loads the model; None for `jaxinfer.loading.load`.

    Raises:
        SystemExit: With code 2 if the port cannot be opened or the model cannot be loaded.
    """
    options = options or ServerOptions()
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # uvicorn's own "running on" line comes before the model is ready, and would mislead.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    listener = _listen(host, port)
    state = ServerState(options)
    server = Server(
        uvicorn.Config(
            create_app(state),
            log_config=None,
            access_log=access_log,
            lifespan="off",
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(options.drain_timeout_s)),
            server_header=False,
            ws="none",
        ),
        state,
    )
    url = _url(listener)
    logger.info("listening on %s, loading the model", url)
    loading = _Loading(load or _load, config, state, server, url)
    loading.start()
    server.run(sockets=[listener])
    _finish(state, loading)


class Server(uvicorn.Server):
    """uvicorn with our word on signals: any second one ends at once, and none is raised again.

    Args:
        config: uvicorn's settings.
        state: Told when draining begins.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState):
        super().__init__(config)
        self._state = state

    def stop(self) -> None:
        """Drain and end. Callable from any thread."""
        self._state.drain()
        self.should_exit = True

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
        if self.should_exit:
            _exit_now(EXIT_FORCED)
        # First the flag: the second signal may come while the line below is being written.
        self.stop()
        logger.info("%s: draining; a second signal ends at once", signal.Signals(sig).name)


class _Loading(threading.Thread):
    """Loads the model while the port already answers."""

    def __init__(
        self,
        load: Callable[[EngineConfig], LoadedModel],
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
        except BaseException as error:  # whatever it is, the process must not stay half alive
            self.error = error
            self._server.stop()
            return
        model, _ = self._state.require_model()
        sys.stdout.write(_ready_text(self._url, model.name))
        sys.stdout.flush()


def _load(config: EngineConfig) -> LoadedModel:
    from jaxinfer import loading  # checkpoints and models come in here, behind the open port

    return loading.load(config, progress=True)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        sys.stderr.write(
            f"jaxinfer: cannot listen on {host}:{port}: {error}\n"
            "Choose another --port, or end the process that has this one.\n"
        )
        raise SystemExit(EXIT_LOAD_FAILED) from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    # An unspecified address is one to listen on, not one to connect to.
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def _ready_text(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"\n{model} is ready at {url}/v1\n\n"
        f"curl {url}/v1/chat/completions \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}'\n\n"
    )


def _finish(state: ServerState, loading: _Loading) -> None:
    """Stop the engine and end the process with the right code."""
    if loading.error is not None:
        _report_load_failure(loading.error)
        raise SystemExit(EXIT_LOAD_FAILED)
    if loading.is_alive():
        _exit_now(0)
    if state.engine is not None:
        state.engine.shutdown()


def _exit_now(code: int) -> NoReturn:
    """End without waiting: a thread inside the compiler or device runtime cannot be interrupted."""
    os._exit(code)


def _report_load_failure(error: BaseException) -> None:
    from checkpoints import CheckpointError

    # Errors made for users say what to do; anything else is a defect and needs its traceback.
    if not isinstance(error, JaxinferError | CheckpointError | OSError):
        logger.error("loading failed", exc_info=error)
    sys.stderr.write(f"jaxinfer: the model cannot be loaded: {error}\n")
