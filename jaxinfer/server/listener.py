"""The socket that a server listens on: a TCP port or a Unix socket, with or without TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from pathlib import Path

from jaxinfer.errors import ConfigError
from jaxinfer.server.options import ServerOptions

BACKLOG = 2048
PROBE_TIMEOUT_S = 1.0


def listen(options: ServerOptions) -> socket.socket:
    """Return the open socket.

    Raises:
        ConfigError: It cannot be opened; the message says what to do.
    """
    if options.uds is not None:
        return _listen_unix(Path(options.uds))
    host, port = options.host, options.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}\n"
            "Choose another --port, or end the process that has this one."
        ) from None


def url_of(listener: socket.socket, options: ServerOptions) -> str:
    """Return where clients find the server; for a Unix socket, its host is made up."""
    scheme = "https" if options.ssl_certfile else "http"
    if options.uds is not None:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    # An unspecified address is one to listen on, not one to connect to.
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}"


def tls_settings(options: ServerOptions) -> dict[str, object]:
    """Return uvicorn's settings for TLS, none if it is off.

    Raises:
        ConfigError: A file cannot be used; told before a model is loaded.
    """
    if options.ssl_certfile is None:
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
    except OSError as error:  # an ssl.SSLError is one
        files = (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
        named = ", ".join(file for file in files if file is not None)
        raise ConfigError(f"TLS needs PEM files that can be read: {named}: {error}") from None
    return {
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "ssl_ca_certs": options.ssl_ca_certs,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
    }


def remove_unix_socket(options: ServerOptions) -> None:
    """Remove the file of a Unix socket, which outlives its process otherwise."""
    if options.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(options.uds)


def _listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and _is_left_behind(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {path}: {error}\n"
            "Choose another --uds, or end the process that has this one."
        ) from None
    return listener


def _is_left_behind(path: Path) -> bool:
    """Whether the file is the socket of a process that is no more; never true of another file."""
    if not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
