"""A loopback stand-in for the Hugging Face hub, as far as `huggingface_hub` talks to it.

Serves the files of one folder as one model: the list of files, its revision, and the files with
ranges. It can refuse, or stop in the middle of a file.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """The server's state.

    Attributes:
        repo_id: The one model there is.
        folder: Its files.
        refuse_with: (status, `X-Error-Code`) for every request, or None.
        stall_in: Name of a file whose body stops halfway until `resume` is set.
        stalled: Set when that has happened.
        requests: "METHOD path" of each request.
    """

    daemon_threads = True
    # Clients of these tests are killed in the middle of a download.
    block_on_close = False

    def __init__(self, repo_id: str, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo_id, self.folder = repo_id, folder
        self.refuse_with: tuple[int, str] | None = None
        self.stall_in: str | None = None
        self.stalled, self.resume = threading.Event(), threading.Event()
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def file_names(self) -> list[str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing to print: a client that goes away is part of the tests."""


@contextmanager
def serve_hub(repo_id: str, folder: Path) -> Iterator[HubServer]:
    """Serve `folder` as model `repo_id` until the block ends."""
    with HubServer(repo_id, folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.resume.set()
            server.shutdown()
            thread.join(timeout=10)


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        repo = self.server.repo_id
        if self.server.refuse_with is not None:
            self._error(*self.server.refuse_with)
        elif path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
            siblings = [{"rfilename": name} for name in self.server.file_names()]
            self._json({"id": repo, "sha": COMMIT, "siblings": siblings})
        elif path in (f"/api/models/{repo}/tree/main", f"/api/models/{repo}/tree/{COMMIT}"):
            self._json([self._entry(name) for name in self.server.file_names()])
        elif path.startswith(f"/{repo}/resolve/"):
            name = path.removeprefix(f"/{repo}/resolve/").partition("/")[2]
            self._file(name)
        elif path.startswith((f"/api/models/{repo}/revision/", f"/api/models/{repo}/tree/")):
            self._error(404, "RevisionNotFound")
        else:
            self._error(404, "RepoNotFound")

    def _entry(self, name: str) -> dict[str, Any]:
        content = (self.server.folder / name).read_bytes()
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def _file(self, name: str) -> None:
        path = self.server.folder / name
        if not path.is_file():
            self._error(404, "EntryNotFound")
            return
        content = path.read_bytes()
        start = 0
        if (wanted := self.headers.get("Range", "")).startswith("bytes="):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        body = content[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if name == self.server.stall_in:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.resume.wait(timeout=60)
            body = body[len(body) // 2 :]
        self.wfile.write(body)

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b'{"error": "refused"}', {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the tests look at `requests`."""
