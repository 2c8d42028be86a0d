"""The one thread that touches the engine: carries out what others ask, and steps.

Others, on any thread, `submit` and `abort`; that is written down as commands, which are carried out
between two steps. Knows no event loop and no text: it wakes the readers of a `Generation`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from jaxinfer.engine import Engine
from jaxinfer.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxinfer.generation import Generation
from jaxinfer.metrics import RequestObserver
from jaxinfer.output_processor import OutputProcessor
from jaxinfer.request import FinishReason

logger = logging.getLogger(__name__)

# An engine on several hosts looks so often whether they are there.
_IDLE_CHECK_S = 1.0
# A step in flight is waited for at shutdown, but not for ever.
_LAST_STEP_TIMEOUT_S = 60.0


class EngineThread(threading.Thread):
    """Steps one engine while there is something to do, and sleeps otherwise.

    Args:
        engine: Belongs to this thread from its start on.
        observer: Hears of latencies, on this thread.
        watches_hosts: Look after other hosts while there is nothing to do.
    """

    def __init__(
        self,
        engine: Engine,
        observer: RequestObserver | None = None,
        *,
        watches_hosts: bool = False,
    ):
        super().__init__(name="jaxinfer-engine", daemon=True)
        self._engine = engine
        self._outputs = OutputProcessor(observer)
        self._idle_check_s = _IDLE_CHECK_S if watches_hosts else None
        # Guards what follows; this thread waits on it.
        self._work = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._live: dict[str, Generation] = {}
        # Whose readers want to hear of their prompt's progress; this thread's own.
        self._watched: list[Generation] = []
        self._closing = False
        self._dead: BaseException | None = None
        self._busy_since: float | None = None

    @property
    def serves(self) -> bool:
        """Whether requests are taken: neither broken nor shut down."""
        return self._dead is None and not self._closing and self.is_alive()

    @property
    def num_live_requests(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._live)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last sign of progress while there is work; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    # On the callers' threads.

    def check_serves(self) -> None:
        """Raise `EngineDeadError` if the engine broke or was shut down."""
        if self._dead is not None:
            raise _dead_error(self._dead)
        if self._closing:
            raise EngineDeadError("the engine was shut down; build a new one")

    def submit(self, generation: Generation) -> None:
        """Run a request.

        Raises:
            InvalidRequestError: Its id is in use.
            EngineDeadError: As `check_serves`.
        """
        with self._work:
            self.check_serves()
            if generation.request_id in self._live:
                raise InvalidRequestError(
                    f"request_id {generation.request_id!r:.80} is in use by a live request; "
                    "choose another",
                    "request_id",
                )
            self._live[generation.request_id] = generation
            self._commands.append(partial(self._add, generation))
            self._work.notify()

    def abort(self, request_id: str) -> None:
        """End a request before the next step; one that has ended is left alone."""
        self.post(partial(self._abort, request_id))

    def post(self, command: Callable[[], None]) -> None:
        """Have something done between two steps."""
        with self._work:
            self._commands.append(command)
            self._work.notify()

    def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Take no new requests, give running ones that long, abort the rest, end. Blocks."""
        with self._work:
            self._closing = True
            self._work.notify()
        if self is threading.current_thread():
            return
        self.join(drain_timeout_s)
        if self.is_alive():
            with self._work:
                running = list(self._live)
            for request_id in running:
                self.abort(request_id)
            self.join(_LAST_STEP_TIMEOUT_S)
        if self.is_alive():
            logger.error("the engine thread is still in a step after %s s", _LAST_STEP_TIMEOUT_S)

    # On this thread.

    def run(self) -> None:
        """Work until `shutdown`, or until something breaks."""
        try:
            while self._wait_for_work():
                self._carry_out_commands()
                if self._engine.has_unfinished():
                    self._step()
                self._busy_since = time.monotonic() if self._engine.has_unfinished() else None
                if self._busy_since is None:
                    self._engine.check_integrity()
        except BaseException as error:  # readers must hear of it, whatever it is
            self._die(error)
        finally:
            self._engine.close()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; return False when there never will be."""
        with self._work:
            while not self._commands and not self._engine.has_unfinished():
                if self._closing:
                    return False
                if not self._work.wait(self._idle_check_s):
                    self._engine.check_integrity()  # other hosts may be lost meanwhile
        return True

    def _carry_out_commands(self) -> None:
        with self._work:
            commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _step(self) -> None:
        self._busy_since = time.monotonic()
        touched, to_abort = self._outputs.process(self._engine.step())
        for sample_id in to_abort:
            self._engine.abort(sample_id, FinishReason.STOP)
        for generation in touched:
            if generation.finished:
                self._forget(generation)
            generation.tell()
        if self._watched:
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._watched = [g for g in self._watched if g.wants_progress]
        for generation in self._watched:
            sample_id = generation.prepared.sample_id(0)
            num_computed_tokens = self._engine.num_computed_tokens(sample_id)
            if num_computed_tokens:
                generation.note_progress(num_computed_tokens)
                generation.tell()

    def _add(self, generation: Generation) -> None:
        """Hand a request to the engine, all samples or none."""
        added = []
        try:
            for sample in generation.samples:
                request = generation.prepared.engine_request(sample.index)
                self._engine.add_request(**request)
                added.append(request["request_id"])
        except (InvalidRequestError, QueueFullError) as error:
            for sample_id in added:
                self._engine.abort(sample_id)
            self._forget(generation)
            generation.fail(error)
        else:
            self._outputs.add(generation)
            if generation.wants_progress:
                self._watched.append(generation)

    def _abort(self, request_id: str) -> None:
        generation, sample_ids = self._outputs.abort(request_id)
        if generation is None:
            return
        for sample_id in sample_ids:
            self._engine.abort(sample_id)
        self._forget(generation)
        generation.tell()
        logger.info(
            "aborted request %s after %d tokens", request_id, generation.num_generation_tokens
        )

    def _forget(self, generation: Generation) -> None:
        with self._work:
            self._live.pop(generation.request_id, None)

    def _die(self, error: BaseException) -> None:
        logger.critical("the engine broke and stops serving", exc_info=error)
        with self._work:
            self._dead = error
            waiting, self._live = list(self._live.values()), {}
            self._commands.clear()
        self._busy_since = None
        for generation in waiting:
            self._outputs.remove(generation)
            generation.fail(_dead_error(error))


def _dead_error(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(
        f"the engine broke and serves nothing more ({type(cause).__name__}: {cause}); "
        "the log has the traceback; restart it"
    )
    error.__cause__ = cause
    return error
