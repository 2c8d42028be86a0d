"""What one server process knows: its options, and whether it loads, serves, drains or is broken."""

from __future__ import annotations

import enum
import hashlib
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.server.call import ServedModel
from jaxinfer.server.errors import UnavailableError
from jaxinfer.server.fields import UnknownFieldLog
from jaxinfer.server.metrics import ServerMetrics, new_registry

if TYPE_CHECKING:
    from jaxinfer.loading import LoadedModel

MIB = 2**20


class Phase(enum.Enum):
    """Where the server stands; the value is what `/health` says."""

    LOADING = "loading"
    OK = "ok"
    DRAINING = "shutting down"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the HTTP side.

    Attributes:
        max_body_bytes: Largest request body; 413 above it.
        drain_timeout_s: How long running requests may go on after a signal to stop.
    """

    max_body_bytes: int = 32 * MIB
    drain_timeout_s: float = 30.0


class ServerState:
    """The state behind all routes. `serve` may be called from another thread.

    Args:
        options: Settings of the HTTP side.

    Attributes:
        registry: Everything that `/metrics` shows.
        unknown_fields: Warns of what clients send in vain.
    """

    def __init__(self, options: ServerOptions | None = None):
        self.options = options or ServerOptions()
        self.registry: CollectorRegistry = new_registry()
        self.unknown_fields = UnknownFieldLog()
        self._serving: tuple[ServedModel, ServerMetrics] | None = None
        self._draining = False

    @property
    def phase(self) -> Phase:
        if self._draining:
            return Phase.DRAINING
        if self._serving is None:
            return Phase.LOADING
        return Phase.OK if self._serving[0].engine.is_alive else Phase.DEAD

    @property
    def engine(self) -> AsyncEngine | None:
        """The engine, None while the model loads."""
        return self._serving and self._serving[0].engine

    def serve(self, loaded: LoadedModel) -> None:
        """Start to answer with this model. Called once, when it is loaded and warm."""
        metrics = ServerMetrics(self.registry, loaded.name, loaded.engine.max_model_len)
        engine = AsyncEngine(loaded, observer=metrics)
        metrics.watch(engine)
        model = ServedModel(
            name=loaded.name,
            engine=engine,
            generation_config=loaded.generation_config,
            fingerprint=_fingerprint(loaded),
            created=int(time.time()),
        )
        self._serving = model, metrics

    def drain(self) -> None:
        """Take no new requests from now on."""
        self._draining = True

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
