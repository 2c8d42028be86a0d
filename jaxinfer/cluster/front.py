"""Takes requests from Ray's proxy, and passes each on to the replica that suits it.

Whatever befalls a replica, its clients get an answer that they can act on: 503 with `Retry-After`
if nothing of the answer was sent yet, else an error event at the end of the stream. A request is
not sent to a second replica: it may be what broke the first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxinfer.cluster.prefix import prefix_hashes
from jaxinfer.cluster.replica import Asked
from jaxinfer.errors import QueueFullError, ReplicaDeadError
from jaxinfer.server.errors import ANTHROPIC_PATH, error_reply

logger = logging.getLogger(__name__)

METRICS_PATH = "/metrics"
# They are about one connection, or Ray's proxy adds its own.
_OF_THE_PROXY = (
    *(b"content-length", b"connection", b"transfer-encoding", b"date", b"server"),
    b"x-request-id",
)


class Front:
    """What Ray's proxy talks to. Holds no model.

    Args:
        replicas: The engines.
    """

    def __init__(self, replicas: DeploymentHandle):
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        if request.url.path.rstrip("/") == METRICS_PATH:
            text = (
                "Each replica counts for itself: see Ray's dashboard, or GET /metrics of a server"
            )
            return Response(text, 404)
        asked = Asked(
            method=request.method,
            path=request.url.path,
            query=request.url.query.encode(),
            headers=tuple(request.headers.raw),
            body=await request.body(),
        )
        stream = self._ask(asked)
        try:
            status, headers = await anext(stream)
            if _is_stream(headers):
                response: Response = StreamingResponse(_until_error(stream, asked.path), status)
            else:
                async with aclosing(stream):
                    response = Response(b"".join([part async for part in stream]), status)
        except (RayError, RayServeException) as error:
            return error_reply(_ours(error)).response(asked.path)
        response.raw_headers[:0] = [h for h in headers if h[0].lower() not in _OF_THE_PROXY]
        return response

    async def _ask(self, asked: Asked) -> AsyncGenerator[Any, None]:
        """Yield what the replica does; closing it aborts the request there."""
        answers = self._replicas.options(stream=True).answer.remote(asked, hashes=_hashes(asked))
        try:
            async for answer in answers:
                yield answer
        finally:
            answers.cancel()


def _hashes(asked: Asked) -> tuple[bytes, ...]:
    try:
        body = json.loads(asked.body)
    except ValueError:
        return ()  # the replica says what is wrong with it
    return tuple(prefix_hashes(body)) if isinstance(body, dict) else ()


async def _until_error(
    stream: AsyncGenerator[bytes, None], path: str
) -> AsyncGenerator[bytes, None]:
    async with aclosing(stream):
        try:
            async for part in stream:
                yield part
        except (RayError, RayServeException) as error:
            reply = error_reply(_ours(error))
            if path.startswith(ANTHROPIC_PATH):
                yield f"event: error\ndata: {json.dumps(reply.anthropic_body())}\n\n".encode()
            else:
                yield f"data: {json.dumps(reply.body())}\n\ndata: [DONE]\n\n".encode()


def _ours(error: Exception) -> Exception:
    """Return the error that tells a client what to do."""
    logger.error("a replica failed: %s", error)
    if type(error).__name__ == "BackPressureError":
        return QueueFullError("all replicas are full; try again later")
    return ReplicaDeadError(str(error))


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    kind = dict(headers).get(b"content-type", b"")
    return kind.startswith(b"text/event-stream")
