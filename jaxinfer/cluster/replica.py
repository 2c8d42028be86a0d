"""An engine as an actor, with the HTTP application of `jaxinfer serve` around it and no port.

A request goes in as bytes and comes out as the messages that would have gone to a socket, so a
cluster knows every endpoint, field and error that a server knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, EngineDeadError
from jaxinfer.server.app import create_app
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.state import Phase, ServerState

if TYPE_CHECKING:
    from jaxinfer.loading import LoadedModel

type Load = Callable[[EngineConfig], LoadedModel | Sequence[LoadedModel]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, as a proxy received it.

    Attributes:
        method: Of HTTP.
        path: Without the query.
        query: As it came.
        headers: As they came.
        body: All of it.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    def scope(self) -> Scope:
        """Return it as ASGI has it."""
        return {
            "type": "http",
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


class EngineReplica:
    """One engine. Ready when constructed.

    Args:
        settings: Fields of `EngineConfig`.
        options: Fields of `ServerOptions`.
        load: Loads the model; None for `jaxinfer.loading`.

    Raises:
        ConfigError: The settings are for several hosts.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        load: Load | None = None,
    ):
        fields: dict[str, Any] = {"playground": False, **(options or {})}
        self.state = ServerState(ServerOptions(**fields))
        config = EngineConfig(**settings)
        if config.num_hosts > 1:
            raise ConfigError(
                f"num_hosts={config.num_hosts}: a replica is one actor, and has the devices of its "
                "own host only; take `jaxinfer serve` on each host"
            )
        self.state.serve((load or _load)(config))
        self._app = create_app(self.state)

    async def answer(
        self, asked: Asked, hashes: Sequence[bytes] = ()
    ) -> AsyncGenerator[tuple[int, list[tuple[bytes, bytes]]] | bytes, None]:
        """Yield status and headers, then the parts of the body.

        Args:
            asked: The request.
            hashes: For the router, which has seen them already.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        bodies = [asked.body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(asked.scope(), receive, messages.put)
            finally:
                await messages.put(None)

        running = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]
            await running
        finally:
            gone.set()  # whoever asked has left: the request is aborted
            if not running.done():
                await asyncio.wait([running])

    async def check_health(self) -> None:
        """Raise if this replica has to be replaced; Ray Serve asks now and then.

        Raises:
            EngineDeadError: It has no engine that serves.
        """
        if self.state.phase not in (Phase.OK, Phase.DRAINING):
            raise EngineDeadError(f"the engine of this replica is {self.state.phase.value}")

    async def __del__(self) -> None:
        await asyncio.to_thread(self.state.close)


def _load(config: EngineConfig) -> LoadedModel | Sequence[LoadedModel]:
    from jaxinfer import loading

    return loading.load_replicas(config, progress=False)
