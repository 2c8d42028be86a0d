"""A step's token outputs → the requests they belong to: text, stop strings, latencies.

The text side of all running requests, shared by `jaxinfer.llm` and `jaxinfer.async_engine`, and the
one place where detokenizing happens. Never touches the engine: it says what to abort.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from jaxinfer.generation import Generation, Sample
from jaxinfer.metrics import NullObserver, RequestObserver
from jaxinfer.request import TokenOutput


class OutputProcessor:
    """The text side of all running requests. Only the thread that steps the engine calls it.

    Args:
        observer: Hears of latencies.
    """

    def __init__(self, observer: RequestObserver | None = None):
        self._observer = observer or NullObserver()
        self._generations: dict[str, Generation] = {}
        self._samples: dict[str, tuple[Generation, Sample]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._generations)

    def add(self, generation: Generation) -> None:
        """Expect outputs of this request's samples."""
        self._generations[generation.request_id] = generation
        for sample in generation.samples:
            name = generation.prepared.sample_id(sample.index)
            self._samples[name] = (generation, sample)

    def process(self, outputs: Iterable[TokenOutput]) -> tuple[list[Generation], list[str]]:
        """Take in a step's outputs.

        Returns:
            The requests with news, and the engine requests to abort with `FinishReason.STOP`
            because a stop string ended their text. Abort first, then `tell` the readers: who hears
            that a request ended may count on its pages being free.
        """
        now = time.monotonic()
        touched: dict[str, Generation] = {}
        to_abort = []
        for output in outputs:
            found = self._samples.get(output.request_id)
            if found is None:
                continue  # aborted or stopped while its step was in flight
            generation, sample = found
            previous = sample.last_token_time
            first = generation.metrics.first_token_time is None
            if generation.push(sample, output, now):
                to_abort.append(output.request_id)
            if sample.finish_reason is not None:
                del self._samples[output.request_id]
            if output.new_token_ids:
                if first:
                    self._observer.on_first_token(now - generation.metrics.arrival_time)
                elif previous is not None:
                    self._observer.on_next_tokens(len(output.new_token_ids), now - previous)
            touched[generation.request_id] = generation
        for generation in touched.values():
            if generation.finished:
                self._forget(generation)
        return list(touched.values()), to_abort

    def abort(self, request_id: str) -> tuple[Generation | None, list[str]]:
        """End a request; return it, None if it does not run, and the engine requests to abort.

        The reader is not told yet, as in `process`.
        """
        generation = self._generations.get(request_id)
        if generation is None:
            return None, []
        running = generation.abort(time.monotonic())
        self._forget(generation)
        return generation, [generation.prepared.sample_id(s.index) for s in running]

    def remove(self, generation: Generation) -> None:
        """Forget a request without a word: it was never admitted, or the engine is dead."""
        self._generations.pop(generation.request_id, None)
        for sample in generation.samples:
            self._samples.pop(generation.prepared.sample_id(sample.index), None)

    def _forget(self, generation: Generation) -> None:
        self.remove(generation)
        self._observer.on_finished(generation.record())
