"""Loads a model that recites, on a replica; runs in the cluster's processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxinfer.config import EngineConfig
from tests.server.fakes import RecitingRunner, make_loaded


class Reciting:
    """A `load` that leaves its process's number in a folder.

    Args:
        folder: Where.
        step_s: How long a step takes.
    """

    def __init__(self, folder: Path, step_s: float = 0.0):
        self._folder = folder
        self._step_s = step_s

    def __call__(self, config: EngineConfig) -> Any:
        runner = RecitingRunner()
        runner.step_s = self._step_s
        (self._folder / str(os.getpid())).touch()
        return make_loaded(
            runner, num_pages=config.num_pages or 2048, max_num_seqs=config.max_num_seqs
        )
