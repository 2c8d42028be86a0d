"""The playground: serves the files of `static/` as they are. Knows nothing of what they do.

The page is a client like any other: all that it shows comes from the API and from `/metrics`. It is
no part of the interface, so `/openapi.json` and `/docs` leave it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
# The page runs its own scripts and talks to its own server, and nothing else: text of a model that
# got into the markup in spite of everything would still do nothing.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def paths() -> frozenset[str]:
    """Return the paths of the page; they need no key, the page asks for one."""
    return frozenset(_path(file) for file in _files())


def routes() -> list[Route]:
    """Return one route per file, each read now: what is served cannot change under a client."""
    return [Route(_path(file), _handler(file), methods=["GET"]) for file in _files()]


def _files() -> list[Path]:
    return sorted(file for file in STATIC.iterdir() if file.suffix in _MEDIA_TYPES)


def _path(file: Path) -> str:
    return "/" if file.name == INDEX else f"/static/{file.name}"


def _handler(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # Ask each time, get it only if it is another: an upgrade must not mix two versions.
        "Cache-Control": "no-cache",
        "ETag": tag,
    }
    media_type = _MEDIA_TYPES[file.suffix]

    async def handle(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return handle
