"""`jaxinfer run-batch`: a file of requests through the server's own routes, without a network.

Each line goes through the same application as a request over HTTP, so a batch knows every endpoint,
field and error that the server knows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Scope

from jaxinfer.errors import JaxinferError
from jaxinfer.server.app import create_app
from jaxinfer.server.batch_file import BatchLine, BatchOutput, check_custom_ids, read_lines
from jaxinfer.server.endpoints import ENDPOINTS
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.state import ServerState

if TYPE_CHECKING:
    from jaxinfer.loading import LoadedModel

# Enough to keep the engine's batch full while answers are written.
LINES_PER_SEQUENCE = 2


class BatchStoppedError(JaxinferError, RuntimeError):
    """The engine answers no more; what is done is in the output."""


@dataclass(frozen=True, kw_only=True)
class BatchProgress:
    """How far a batch is.

    Attributes:
        done: Lines with an answer, of earlier runs too.
        failed: Those of them that tell of an error.
        total: All lines.
    """

    done: int
    failed: int
    total: int


def run_batch(
    source: Path,
    destination: Path,
    load: Callable[[], LoadedModel | Sequence[LoadedModel]],
    *,
    options: ServerOptions | None = None,
    concurrency: int | None = None,
    on_progress: Callable[[BatchProgress], None] = lambda progress: None,
) -> BatchProgress:
    """Answer all lines of a file that have no answer yet, and return how it went.

    Args:
        source: OpenAI's batch input: `custom_id`, `method`, `url`, `body` per line.
        destination: Its output. If it exists, the lines that it answers are not asked again.
        load: Loads the model; not called if there is nothing to do.
        options: Settings of the HTTP side.
        concurrency: Requests at work at once; None for twice the engine's `max_num_seqs`.
        on_progress: Hears of each answer.

    Raises:
        BatchFileError: A file cannot be read or written, or the two do not belong together.
        BatchStoppedError: The engine broke; run the same again to go on.
    """
    urls = _urls()
    known = check_custom_ids(source, urls)
    with BatchOutput(destination, known) as output:

        def progress() -> BatchProgress:
            done, failed = len(output.done), output.num_failed
            return BatchProgress(done=done, failed=failed, total=len(known))

        on_progress(progress())
        if len(output.done) == len(known):
            return progress()
        loaded = load()
        replicas = loaded if isinstance(loaded, Sequence) else [loaded]
        state = ServerState(options)
        state.serve(replicas)
        lines = (line for line in read_lines(source, urls) if line.id not in output.done)
        num_seqs = sum(model.config.max_num_seqs for model in replicas)
        width = concurrency or LINES_PER_SEQUENCE * num_seqs
        work = _run(create_app(state), lines, output, width, lambda: on_progress(progress()))
        try:
            asyncio.run(work)
        finally:
            state.close()
        return progress()


def answer_file(app: ASGIApp, source: Path, destination: Path, width: int) -> BatchProgress:
    """Answer the lines of a file that have no answer yet, by an application that is ready.

    Raises:
        BatchFileError, BatchStoppedError: As `run_batch`.
    """
    urls = _urls()
    known = check_custom_ids(source, urls)
    with BatchOutput(destination, known) as output:
        lines = (line for line in read_lines(source, urls) if line.id not in output.done)
        asyncio.run(_run(app, lines, output, width, lambda: None))
        return BatchProgress(done=len(output.done), failed=output.num_failed, total=len(known))


def _urls() -> tuple[str, ...]:
    return tuple(e.path for e in ENDPOINTS if e.call is not None and e.path.startswith("/v1/"))


async def _run(
    app: ASGIApp,
    lines: Iterator[BatchLine],
    output: BatchOutput,
    width: int,
    on_answer: Callable[[], None],
) -> None:
    async def work() -> None:
        # All workers share the iterator: a line is read when somebody is free for it.
        for line in lines:
            await _answer(app, line, output)
            on_answer()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(work())
    except ExceptionGroup as errors:
        # The first tells why; the others were under way when it came.
        raise errors.exceptions[0] from None


async def _answer(app: ASGIApp, line: BatchLine, output: BatchOutput) -> None:
    if line.error is not None:
        output.refuse(line, line.error)
        return
    status, request_id, raw = await _ask(app, line.url, json.dumps(line.body).encode())
    body = json.loads(raw)
    if status == 503:
        raise BatchStoppedError(
            f"the batch stopped at line {line.number}: {body['error']['message']} "
            "Run the same command again to go on."
        )
    output.answer(line, status, request_id, body)


async def _ask(app: ASGIApp, path: str, body: bytes) -> tuple[int, str, bytes]:
    """Return status, request id and body of a request's response."""
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    requests = [body]
    never = asyncio.Event()
    response: dict[str, Any] = {"status": 500, "headers": {}}
    parts: list[bytes] = []

    async def receive() -> Message:
        if not requests:
            await never.wait()  # this client does not leave
        return {"type": "http.request", "body": requests.pop(), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response["status"] = message["status"]
            response["headers"] = dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    request_id = response["headers"].get(b"x-request-id", b"").decode()
    return response["status"], request_id, b"".join(parts)
