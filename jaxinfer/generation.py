"""The growing result of one request: written by the thread that steps, read by the one that waits.

Knows one request and the forms of its answer; neither engines nor queues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxinfer.detokenizer import Detokenizer
from jaxinfer.hooks import CapturedChunk, Captures
from jaxinfer.input_processor import PreparedRequest
from jaxinfer.metrics import RequestRecord
from jaxinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxinfer.request import FinishReason, TokenLogprobs, TokenOutput
from jaxinfer.tokenizer import Tokenizer

# What a reader takes away at once: tokens, text, log-probabilities, and the state to go with them.
type _Part = tuple[list[int], list[str], list[TokenLogprobs], CompletionOutput]


@dataclass(kw_only=True)
class Sample:
    """One sample: what was produced and not yet read, and what was read.

    New things lie in lists that the reader takes away whole, so a token is handled once however
    long the output is and however slow the reader.
    """

    index: int
    detokenizer: Detokenizer | None
    num_tokens: int = 0
    last_token_time: float | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    news: bool = False
    new_text: list[str] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    read_text: str = ""
    read_token_ids: list[int] = field(default_factory=list)
    read_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    captured: list[CapturedChunk] = field(default_factory=list)
    captures: Captures | None = None


class Generation:
    """The growing result of one request: one thread writes, one reads.

    Args:
        prepared: The request.
        tokenizer: Of the model.
        delta: `take` returns only what is new since the last call, instead of all so far.
        final_only: `take` returns nothing before the end.
        progress: `take` also tells of the prompt's progress, in outputs without samples.
        notify: Called on the writing thread whenever `take` has something to return.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        tokenizer: Tokenizer,
        *,
        delta: bool = False,
        final_only: bool = False,
        progress: bool = False,
        notify: Callable[[], None] | None = None,
    ):
        self.prepared = prepared
        self.num_cached_tokens = 0
        # The reader's own list: what it does to it must not reach the engine.
        self._prompt_token_ids = list(prepared.prompt_token_ids)
        self.metrics = RequestMetrics(arrival_time=prepared.arrival_time)
        self.samples = [
            Sample(index=i, detokenizer=_detokenizer(tokenizer, prepared))
            for i in range(prepared.params.n)
        ]
        self._tokenizer = tokenizer
        self._delta = delta
        self._final_only = final_only
        self._progress = progress
        self._num_computed_tokens: int | None = None
        self._embedding: Any = None
        self._notify = notify
        # Short critical sections: lists change hands under it, text is put together outside.
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._read_prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def request_id(self) -> str:
        return self.prepared.request_id

    @property
    def finished(self) -> bool:
        """Whether nothing more will come: all samples ended, or the request failed."""
        return self._error is not None or all(s.finish_reason for s in self.samples)

    @property
    def num_generation_tokens(self) -> int:
        """Tokens produced so far, all samples together."""
        return sum(sample.num_tokens for sample in self.samples)

    def take(self) -> RequestOutput | None:
        """Return what there is to tell, None if that is nothing. Never blocks.

        Raises:
            Exception: That with which the request failed.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            finished = self.finished
            fresh = [s for s in self.samples if s.news]
            num_computed_tokens, self._num_computed_tokens = self._num_computed_tokens, None
            if fresh:
                num_computed_tokens = None
            if (not fresh and num_computed_tokens is None) or (self._final_only and not finished):
                return None
            samples = fresh if self._delta or not fresh else self.samples
            parts = [self._cut(sample) for sample in samples]
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
            metrics = replace(self.metrics)
        outputs = [
            self._completion(sample, *part) for sample, part in zip(samples, parts, strict=True)
        ]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=self._prompt_entries(prompt_logprobs),
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=num_computed_tokens,
            embedding=self._embedding,
            metrics=metrics,
        )

    @property
    def unread_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """What came of the prompt's log-probabilities since the last `take`."""
        return self._prompt_logprobs

    @property
    def unread_embedding(self) -> Any:
        """The prompt's vector, if it has come."""
        return self._embedding

    @property
    def wants_progress(self) -> bool:
        """Whether the reader still waits for the prompt, and wants to hear how far it is."""
        return self._progress and not self.finished and self.num_generation_tokens == 0

    def note_progress(self, num_computed_tokens: int) -> None:
        """Take in how many of the prompt's tokens are computed."""
        with self._lock:
            self._num_computed_tokens = num_computed_tokens

    def fail(self, error: BaseException) -> None:
        """End the request with `error`, which the reader gets raised."""
        with self._lock:
            self._error = error
        self.tell()

    def push(self, sample: Sample, output: TokenOutput, now: float) -> bool:
        """Take in what a step gave one sample; return whether a stop string ended it here."""
        token_ids, logprobs = output.new_token_ids, output.logprobs or ()
        finish_reason, stop_reason, text = output.finish_reason, output.stop_reason, ""
        stopped_here = False
        if sample.detokenizer is not None:
            text = sample.detokenizer.push(
                self._visible(output), finished=finish_reason is not None
            )
            if sample.detokenizer.stop_reason is not None:
                # What the engine produced after the token that completed the stop string is not
                # part of the answer, although it came in the same step.
                num_used = sample.detokenizer.num_tokens_used - sample.num_tokens
                token_ids, logprobs = token_ids[:num_used], logprobs[:num_used]
                stopped_here = finish_reason is None
                finish_reason, stop_reason = FinishReason.STOP, sample.detokenizer.stop_reason
        sample.captured.extend(output.captured)
        if finish_reason is not None:
            whole = finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._keep_captures(sample, sample.num_tokens + len(token_ids), whole=whole)
        with self._lock:
            if output.pooled is not None:
                self._embedding = output.pooled
            if output.prompt_logprobs is not None:
                self._prompt_logprobs = output.prompt_logprobs
            if sample.index == 0 and sample.num_tokens == 0:
                self.num_cached_tokens = output.num_cached_tokens
            if self.metrics.first_scheduled_time is None:
                self.metrics.first_scheduled_time = output.first_scheduled_time
            self._append(sample, token_ids, text, logprobs, now)
            if finish_reason is not None:
                sample.stop_reason, sample.error = stop_reason, output.error
                self._end(sample, finish_reason, now)
        return stopped_here

    def abort(self, now: float, reason: FinishReason = FinishReason.ABORT) -> list[Sample]:
        """End the samples that still run; return them. Text held back until now comes out."""
        running = [s for s in self.samples if s.finish_reason is None]
        for sample in running:
            text = sample.detokenizer.push((), finished=True) if sample.detokenizer else ""
            self._keep_captures(sample, sample.num_tokens, whole=False)
            with self._lock:
                self._append(sample, (), text, (), now)
                self._end(sample, reason, now)
        return running

    @property
    def num_saved_bytes(self) -> int:
        """What was written to disk of what hooks saw."""
        return sum(s.captures.num_saved_bytes for s in self.samples if s.captures is not None)

    def tell(self) -> None:
        """Wake the reader, if there is something for it."""
        if self._notify is not None and (self.finished or not self._final_only):
            self._notify()

    def record(self) -> RequestRecord:
        """Return how the finished request went."""
        times = self.metrics
        first, end = times.first_token_time, times.finished_time
        scheduled = times.first_scheduled_time
        return RequestRecord(
            request_id=self.request_id,
            finish_reasons=tuple(str(s.finish_reason) for s in self.samples),
            num_prompt_tokens=len(self.prepared.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_generation_tokens=tuple(s.num_tokens for s in self.samples),
            e2e_s=_since(times.arrival_time, end) or 0.0,
            queue_s=_since(times.arrival_time, scheduled),
            prefill_s=_since(scheduled, first),
            ttft_s=_since(times.arrival_time, first),
            decode_s=_since(first, times.last_token_time),
        )

    def _keep_captures(self, sample: Sample, num_tokens: int, *, whole: bool) -> None:
        """Put together what hooks saw of a sample that ends with so many tokens.

        If it was not cut short, what was asked for must be there, without a hole.
        """
        hooks = self.prepared.hooks
        if hooks is not None and hooks.capture:
            num_computed = len(self.prepared.prompt_token_ids) + max(num_tokens - 1, 0)
            captures = Captures.join(sample.captured, hooks.capture, num_computed, hooks.nothing)
            if whole:
                num_prompt = len(self.prepared.prompt_token_ids)
                expected = hooks.select(0, num_computed, num_prompt)
                got = captures.positions
                assert np.array_equal(got, expected), f"captured {got}, expected {expected}"
            sample.captured = []
            sample.captures = captures if hooks.keep is None else hooks.keep(sample.index, captures)

    def _visible(self, output: TokenOutput) -> tuple[int, ...]:
        """Return the tokens that have a text: a token that ends the output has none."""
        hide = output.finish_reason is FinishReason.STOP
        if hide and not self.prepared.params.include_stop_str_in_output:
            return output.new_token_ids[:-1]
        return output.new_token_ids

    def _append(
        self,
        sample: Sample,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs],
        now: float,
    ) -> None:
        sample.new_token_ids.extend(token_ids)
        sample.new_logprobs.extend(logprobs)
        if text:
            sample.new_text.append(text)
        if token_ids:
            sample.news = True
            sample.num_tokens += len(token_ids)
            sample.last_token_time = self.metrics.last_token_time = now
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
        if logprobs:
            total = sample.cumulative_logprob or 0.0
            sample.cumulative_logprob = total + sum(entry.logprob for entry in logprobs)

    def _end(self, sample: Sample, reason: FinishReason, now: float) -> None:
        sample.finish_reason, sample.news = reason, True
        if all(s.finish_reason for s in self.samples):
            self.metrics.finished_time = now

    def _cut(self, sample: Sample) -> _Part:
        """Take the new parts away from the writer, with the state that belongs to them."""
        parts = sample.new_token_ids, sample.new_text, sample.new_logprobs
        sample.new_token_ids, sample.new_text, sample.new_logprobs = [], [], []
        sample.news = False
        output = CompletionOutput(
            index=sample.index,
            cumulative_logprob=sample.cumulative_logprob,
            finish_reason=None if sample.finish_reason is None else sample.finish_reason.value,
            stop_reason=sample.stop_reason,
            error=sample.error,
        )
        if sample.captures is not None:
            output.captures = sample.captures.arrays
            output.capture_positions = sample.captures.positions
        return *parts, output

    def _completion(
        self,
        sample: Sample,
        token_ids: list[int],
        text: list[str],
        logprobs: list[TokenLogprobs],
        output: CompletionOutput,
    ) -> CompletionOutput:
        entries = [self._entry(token, lp) for token, lp in zip(token_ids, logprobs, strict=False)]
        output.text = "".join(text)
        if not self._delta:
            sample.read_text += output.text
            sample.read_token_ids += token_ids
            sample.read_logprobs += entries
            output.text = sample.read_text
            token_ids, entries = list(sample.read_token_ids), list(sample.read_logprobs)
        output.token_ids = token_ids
        if self.prepared.params.logprobs is not None:
            output.logprobs = entries
        return output

    def _prompt_entries(
        self, new: Sequence[TokenLogprobs | None] | None
    ) -> list[dict[int, Logprob] | None] | None:
        """Return the prompt's log-probabilities: with each cumulative output, or one delta."""
        if new is not None:
            ids = self.prepared.prompt_token_ids
            self._read_prompt_logprobs = [
                None if lp is None else self._entry(token, lp)
                for token, lp in zip(ids, new, strict=False)
            ]
        entries = self._read_prompt_logprobs
        if self._delta:
            self._read_prompt_logprobs = None
        return entries

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        entry = {token_id: self._logprob(token_id, logprobs.logprob, logprobs.rank)}
        likeliest = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        for rank, (top_id, value) in enumerate(likeliest, 1):
            if top_id not in entry:
                entry[top_id] = self._logprob(top_id, value, rank)
        ids = self.prepared.params.logprob_token_ids or ()
        for asked_id, (value, rank) in zip(ids, logprobs.asked, strict=False):
            entry.setdefault(asked_id, self._logprob(asked_id, value, rank))
        return entry

    def _logprob(self, token_id: int, value: float, rank: int) -> Logprob:
        text = self._tokenizer.token_text(token_id) if self.prepared.params.detokenize else None
        return Logprob(logprob=value, rank=rank, decoded_token=text)


def _detokenizer(tokenizer: Tokenizer, prepared: PreparedRequest) -> Detokenizer | None:
    params = prepared.params
    if not params.detokenize:
        return None
    return Detokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        stop=params.stop or (),
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        prompt_token_ids=prepared.prompt_token_ids,
    )


def _since(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
