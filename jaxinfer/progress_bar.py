"""How far a batch is, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal, Self

from jaxinfer.generation import Generation
from jaxinfer.input_processor import PreparedRequest


def shows_progress(use_tqdm: bool | Literal["always"], num_prompts: int) -> bool:
    """Return whether a bar is wanted, and seen by anybody."""
    return use_tqdm == "always" or (use_tqdm and num_prompts > 1 and sys.stderr.isatty())


class NoProgressBar:
    """Shows nothing."""

    def __init__(self, requests: Sequence[PreparedRequest]):
        self._requests = requests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, touched: Sequence[Generation]) -> None:
        """Take note of the requests that got tokens."""


class ProgressBar(NoProgressBar):
    """Prompts done, and the speed of reading and writing so far."""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("Prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=len(self._requests), speed="")
        self._num_input = self._num_output = self._num_saved_bytes = 0
        self._seen: dict[str, int] = {}
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def update(self, touched: Sequence[Generation]) -> None:
        for generation in touched:
            if generation.request_id not in self._seen:
                self._num_input += len(generation.prepared.prompt_token_ids)
            num_tokens = generation.num_generation_tokens
            self._num_output += num_tokens - self._seen.get(generation.request_id, 0)
            self._seen[generation.request_id] = num_tokens
            if generation.finished:
                self._num_saved_bytes += generation.num_saved_bytes
        elapsed = max(self._progress.tasks[0].elapsed or 0.0, 1e-6)
        speed = (
            f"in {self._num_input / elapsed:.0f} tok/s, out {self._num_output / elapsed:.0f} tok/s"
        )
        if self._num_saved_bytes:
            speed += f", {self._num_saved_bytes / 1e6:.0f} MB of captures saved"
        self._progress.update(
            self._task,
            advance=sum(g.finished for g in touched),
            speed=speed,
        )
