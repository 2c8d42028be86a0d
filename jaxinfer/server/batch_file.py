"""OpenAI's batch files: lines of requests in, lines of answers out, and which are done already.

Knows no model. A line's `id` in the output names its number and its content, so that a run that
was cut off goes on where it was, and only with the same input.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidRequestError, JaxinferError, quoted
from jaxinfer.server.body import parse_json_object


class BatchFileError(JaxinferError, ValueError):
    """A file that cannot be run, or written, as a whole; one bad line is no such error."""


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """One request of an input file.

    Attributes:
        number: Of the line, from 1.
        id: Of its answer.
        custom_id: What its author calls it; None if it cannot be read.
        url: Where it would be sent.
        body: What would be sent.
        error: Why it cannot be; then `url` and `body` mean nothing.
    """

    number: int
    id: str
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def read_lines(path: Path, urls: Collection[str]) -> Iterator[BatchLine]:
    """Yield the requests of a file, blank lines left out, one in memory at a time.

    Args:
        path: The file.
        urls: Those that can be asked.

    Raises:
        BatchFileError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield _line(number, raw.strip(), urls)
    except OSError as error:
        raise BatchFileError(f"{path} cannot be read: {error.strerror}") from None


def check_custom_ids(path: Path, urls: Collection[str]) -> frozenset[str]:
    """Return the ids of all lines of an input.

    Raises:
        BatchFileError: It cannot be read, is empty, or two lines have the same `custom_id`.
    """
    lines_of: dict[str, int] = {}
    ids = set()
    for line in read_lines(path, urls):
        ids.add(line.id)
        if line.custom_id is None:
            continue
        first = lines_of.setdefault(line.custom_id, line.number)
        if first != line.number:
            raise BatchFileError(
                f"{path}: lines {first} and {line.number} have the same custom_id "
                f"{quoted(line.custom_id)}; answers are told apart by it"
            )
    if not ids:
        raise BatchFileError(f"{path} holds no request; write one JSON object per line")
    return frozenset(ids)


class BatchOutput:
    """The answers of a batch, in the order in which they come. A context manager.

    Each is one `write`, so that the end of the process, however sudden, cuts at most the last line;
    opening the file again removes what was cut.

    Args:
        path: Made if it does not exist, else continued.
        known: The ids that its lines may have.

    Attributes:
        done: The ids of its lines.
        num_failed: How many of them tell of an error.

    Raises:
        BatchFileError: It is not the output of this input, or cannot be written.
    """

    def __init__(self, path: Path, known: Collection[str]):
        self._path = path
        self.done: set[str] = set()
        self.num_failed = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            # Held until the file is closed, by whatever end this process has.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, self._read(known))
        except BlockingIOError:
            os.close(self._file)
            raise BatchFileError(f"{path} is being written by another run; wait for it") from None
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def answer(self, line: BatchLine, status: int, request_id: str, body: Any) -> None:
        """Write what a request was answered.

        Raises:
            BatchFileError: It cannot be written.
        """
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._write(line, {"response": response, "error": None})

    def refuse(self, line: BatchLine, message: str) -> None:
        """Write why a line was no request. Errors as in `answer`."""
        error = {"code": "invalid_line", "message": f"line {line.number}: {message}"}
        self._write(line, {"response": None, "error": error})

    def _write(self, line: BatchLine, result: dict[str, Any]) -> None:
        entry = {"id": line.id, "custom_id": line.custom_id, **result}
        data = json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            written = os.write(self._file, data)
            while written < len(data):  # a disk that fills up takes a part
                written += os.write(self._file, data[written:])
        except OSError as error:
            raise self._unwritable(error) from None
        self._count(entry)

    def _read(self, known: Collection[str]) -> int:
        """Take in the lines there are; return where the last whole one ends."""
        end = 0
        try:
            with self._path.open("rb") as file:
                for number, raw in enumerate(file, start=1):
                    if not raw.endswith(b"\n"):
                        break
                    self._count(self._entry(number, raw, known))
                    end += len(raw)
        except OSError as error:
            raise BatchFileError(f"{self._path} cannot be read: {error.strerror}") from None
        return end

    def _entry(self, number: int, raw: bytes, known: Collection[str]) -> dict[str, Any]:
        try:
            entry = json.loads(raw)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not {"id", "response"} <= entry.keys():
            raise BatchFileError(
                f"{self._path}: line {number} is no answer of a batch; give another --output"
            )
        if entry["id"] not in known:
            raise BatchFileError(
                f"{self._path}: line {number} answers a request that is not in the input, or has "
                "changed since; give another --output, or remove the file to start anew"
            )
        return entry

    def _count(self, entry: dict[str, Any]) -> None:
        self.done.add(entry["id"])
        response = entry["response"]
        self.num_failed += response is None or response["status_code"] >= 400

    def _unwritable(self, error: OSError) -> BatchFileError:
        return BatchFileError(f"{self._path} cannot be written: {error.strerror}")


def _line(number: int, raw: bytes, urls: Collection[str]) -> BatchLine:
    line_id = f"batch_req_{number}_{hashlib.sha256(raw).hexdigest()[:16]}"
    custom_id = None
    try:
        entry = parse_json_object(raw)
        given = entry.get("custom_id")
        if not isinstance(given, str) or not given:
            raise InvalidRequestError("custom_id must be a string that is not empty")
        custom_id = given
        if entry.get("method", "POST") != "POST":
            raise InvalidRequestError(f'method must be "POST", got {quoted(entry["method"])}')
        url = entry.get("url", "")
        if url not in urls:
            raise InvalidRequestError(f"url must be one of {', '.join(urls)}, got {quoted(url)}")
        body = entry.get("body")
        if not isinstance(body, dict):
            raise InvalidRequestError("body must be a JSON object")
        if body.get("stream"):
            raise InvalidRequestError("body.stream: a batch has nobody to stream to; leave it out")
    except InvalidRequestError as error:
        return BatchLine(number=number, id=line_id, custom_id=custom_id, error=str(error))
    return BatchLine(number=number, id=line_id, custom_id=custom_id, url=url, body=body)
