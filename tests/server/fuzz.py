"""Fuzzing over the server's own OpenAPI document: no 5xx, and every answer as described.

Run it with `make fuzz`; a short run is one of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from tests.server.serving import running_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


def fuzz(max_time_s: int, *, seed: int | None = None) -> str:
    """Fuzz a server of its own for so long; return the report.

    Raises:
        AssertionError: With what was found.
    """
    with running_server() as server, tempfile.TemporaryDirectory() as folder:
        server.load(max_model_len=128, num_pages=4096)
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", ",".join(CHECKS)),
            *("--phases", "coverage,fuzzing"),
            *("--max-time", str(max_time_s)),
            *("--request-timeout", "20"),
            *("--suppress-health-check", "all"),
            *("--warnings", "off"),
            *(() if seed is None else ("--seed", str(seed))),
        ]
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=max_time_s + 120,
            env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": folder},
        )
        assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-2000:]}"
        server.assert_works()
        server.assert_idle()
        return done.stdout


if __name__ == "__main__":
    sys.stdout.write(fuzz(int(sys.argv[1])))
