"""What one server process knows: its options, and whether it loads, serves, drains or is broken."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.replicas import Replicas, ServingEngine
from jaxinfer.server.call import ServedModel
from jaxinfer.server.edited_models import edited_models
from jaxinfer.server.errors import UnavailableError
from jaxinfer.server.fields import UnknownFieldLog
from jaxinfer.server.limits import Deadlines, StreamSlots
from jaxinfer.server.metrics import ServerMetrics, new_registry
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.tracing import make_tracer
from jaxinfer.server.watchdog import Watchdog

if TYPE_CHECKING:
    from jaxinfer.loading import LoadedModel


class Phase(enum.Enum):
    """Where the server stands; the value is what `/health` says."""

    LOADING = "loading"
    OK = "ok"
    DEGRADED = "degraded"
    STALLED = "stalled"
    DRAINING = "shutting down"
    DEAD = "dead"


class ServerState:
    """The state behind all routes. `serve` may be called from another thread.

    Args:
        options: Settings of the HTTP side.

    Attributes:
        registry: Everything that `/metrics` shows.
        unknown_fields: Warns of what clients send in vain.
        num_in_flight: Requests with a body that are being answered; the event loop's own.
        streams: Counts those of them that are open streams; the event loop's own.
        deadlines: Ends requests in time; the event loop's own.
        long_bodies: Held while one is parsed; the event loop's own.
        tracer: Hears of every API request.

    Raises:
        ConfigError: Traces are asked for, and OpenTelemetry is not installed.
    """

    def __init__(self, options: ServerOptions | None = None):
        self.options = options or ServerOptions()
        self.registry: CollectorRegistry = new_registry()
        self.unknown_fields = UnknownFieldLog()
        self.num_in_flight = 0
        self.streams = StreamSlots(self.options.max_concurrent_streams)
        self.deadlines = Deadlines(self.options.request_timeout_s)
        self.long_bodies = asyncio.Semaphore()
        self.tracer = make_tracer(self.options.otlp_traces_endpoint)
        self._watchdogs: list[Watchdog] = []
        self._serving: tuple[ServedModel, ServerMetrics] | None = None
        self._draining = False

    @property
    def phase(self) -> Phase:
        if self._draining:
            return Phase.DRAINING
        if self._serving is None:
            return Phase.LOADING
        engine = self._serving[0].engine
        if not engine.is_alive:
            return Phase.DEAD
        # A dead replica has told its clients; one that hangs has not, and only a restart ends it.
        if self.stalled_s:
            return Phase.STALLED
        whole = isinstance(engine, AsyncEngine) or engine.num_alive == len(engine.engines)
        return Phase.OK if whole else Phase.DEGRADED

    @property
    def draining(self) -> bool:
        """Whether the server is about to end."""
        return self._draining

    @property
    def stalled_s(self) -> float:
        """Seconds without progress of any replica, if that is longer than it may be; else 0."""
        return max((watchdog.stalled_s for watchdog in self._watchdogs), default=0.0)

    @property
    def engine(self) -> ServingEngine | None:
        """The engine, None while the model loads."""
        return self._serving and self._serving[0].engine

    def serve(self, loaded: LoadedModel | Sequence[LoadedModel]) -> None:
        """Start to answer with this model, or its replicas. Called once, when all is warm.

        Raises:
            ConfigError: An edited model cannot be served; nothing is, then.
        """
        replicas = loaded if isinstance(loaded, Sequence) else [loaded]
        loaded = replicas[0]
        metrics = ServerMetrics(
            self.registry,
            loaded.name,
            loaded.engine.max_model_len,
            prefix=self.options.metrics_prefix,
            num_engines=len(replicas),
        )
        engine: ServingEngine
        if len(replicas) == 1:
            engine = AsyncEngine(loaded, observer=metrics.observers[0])
            engines = [engine]
        else:
            engine = Replicas(replicas, observers=metrics.observers)
            engines = list(engine.engines)
        metrics.watch(engines)
        if self.options.stall_timeout_s is not None:
            self._watchdogs = [Watchdog(one, self.options.stall_timeout_s) for one in engines]
            for watchdog in self._watchdogs:
                watchdog.start()
        model = ServedModel(
            name=loaded.name,
            engine=engine,
            generation_config=loaded.generation_config,
            fingerprint=_fingerprint(loaded),
            created=int(time.time()),
        )
        try:
            edited = edited_models(model, self.options.edit, sharded=loaded.config.num_hosts > 1)
        except BaseException:
            for watchdog in self._watchdogs:
                watchdog.stop()
            engine.shutdown()
            raise
        self._serving = replace(model, edited=edited), metrics

    def drain(self) -> None:
        """Take no new requests from now on."""
        self._draining = True

    def close(self) -> None:
        """Stop the engine and what watches it. Blocks."""
        for watchdog in self._watchdogs:
            watchdog.stop()
        if self.engine is not None:
            self.engine.shutdown()
        self.tracer.close()

    def require_model(self) -> tuple[ServedModel, ServerMetrics]:
        """Return who answers.

        Raises:
            UnavailableError: Nobody, yet or any more. A dead engine says so itself.
        """
        if self._draining:
            raise UnavailableError("The server is shutting down")
        if self._serving is None:
            raise UnavailableError("The model is loading; GET /health answers 200 when it is ready")
        return self._serving


def package_version() -> str:
    """Return jaxinfer's version."""
    try:
        return version("jaxinfer")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"


def _fingerprint(loaded: LoadedModel) -> str:
    config = loaded.config
    facts = (
        package_version(),
        loaded.name,
        config.dtype,
        config.quantization,
        config.kernels,
    )
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
