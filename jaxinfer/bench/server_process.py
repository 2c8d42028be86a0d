"""A server of our own for the time of a benchmark: a process that ends with it."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager

import httpx

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError

_POLL_S = 0.05
_PENDING = re.compile(r"^\w*compilations_pending(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@contextmanager
def own_server(config: EngineConfig, *, timeout_s: float = 900.0) -> Generator[str]:
    """Start `jaxinfer serve` on a free port of this machine; yield its URL once all is compiled.

    Raises:
        ConfigError: It did not start; the message has the end of what it said.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", "from jaxinfer.cli import app; app()", "serve"]
    command += ["--host", "127.0.0.1", "--port", str(port), *engine_flags(config)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            if not _wait_until_warm(process, url, timeout_s):
                log.seek(0)
                said = log.read().decode(errors="replace").strip()
                raise ConfigError(f"the server did not start: {said[-1000:]}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def engine_flags(config: EngineConfig) -> list[str]:
    """Return the flags that give a server these settings: those that are not the defaults."""
    flags = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value == f.default:
            continue
        flag = f.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _wait_until_warm(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    with httpx.Client(base_url=url, trust_env=False, timeout=10.0) as http:
        while time.monotonic() < end and process.poll() is None:
            try:
                if http.get("/health").status_code == 200:
                    found = _PENDING.search(http.get("/metrics").text)
                    if found is None or float(found[1]) == 0:
                        return True
            except httpx.HTTPError:
                pass  # not there yet
            time.sleep(_POLL_S)
    return False
