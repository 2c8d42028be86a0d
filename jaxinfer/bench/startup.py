"""Seconds from the start of a Python process to a model's first token.

The first start has an empty compilation cache, the others find it full. Each is a process of its
own; its CPU time stands beside the wall time, which means little on a busy machine.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from jaxinfer.bench.machine import describe_machine
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError

TIMEOUT_S = 1800
PARTS = ("python_s", "import_s", "load_s", "generate_s", "first_token_s", "cpu_s")


def run_startup(
    config: EngineConfig,
    *,
    prompt: str,
    repeats: int,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Start a first time and `repeats` times again, and return what each part took.

    Args:
        config: Settings; the compilation cache is an empty folder of this run's.
        prompt: What the first token answers.
        repeats: Later starts; medians are of these.
        on_progress: Told what is measured next.

    Raises:
        ConfigError: A process ended without a token; the message has the end of what it said.
    """
    with tempfile.TemporaryDirectory() as cache:
        config = dataclasses.replace(config, compilation_cache_dir=cache)
        on_progress("first start")
        first = _start(config, prompt, finish=True)
        later = []
        for i in range(repeats):
            on_progress(f"later start {i + 1} of {repeats}")
            later.append(_start(config, prompt, finish=False))
    return {
        "benchmark": "startup",
        "machine": describe_machine(),
        "settings": _given(config),
        "points": [
            {"start": "first", **first},
            {"start": "later", **{k: statistics.median(run[k] for run in later) for k in first}},
        ],
        "later": later,
    }


def startup_table(result: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    machine = result["machine"]
    lines = [
        f"{machine['device']}, {machine['cores']} cores, load {machine['load_average']}",
        "",
        "| start | Python | import | load | generate | first token | CPU | programs |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for point in result["points"]:
        seconds = " | ".join(f"{point[part]:.2f} s" for part in PARTS)
        programs = f"{point['programs']:.0f} + {point['pending']:.0f} pending"
        lines.append(f"| {point['start']} | {seconds} | {programs} |")
    return "\n".join(lines)


def _given(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that are not the defaults."""
    fields = dataclasses.fields(config)
    values = {f.name: getattr(config, f.name) for f in fields}
    return {f.name: values[f.name] for f in fields if values[f.name] != f.default}


def _start(config: EngineConfig, prompt: str, *, finish: bool) -> dict[str, float]:
    asked = {
        "settings": _given(config),
        "prompt": prompt,
        "finish": finish,
        "started": time.time(),
    }
    command = [sys.executable, "-m", "jaxinfer.bench.first_token", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(f"the process ended without a token: {done.stderr.strip()[-1000:]}")
    parts = json.loads(done.stdout.splitlines()[-1])
    assert not parts["surprises"], "a program was compiled in a step"
    return parts
