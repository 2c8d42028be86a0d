"""Who runs in the next step, for how many tokens and in which pages; and what its result means.

Knows requests, counts and page ids. Knows no model, no arrays and no text: a step leaves here as a
`StepPlan` and comes back as a `StepResult`.

There is no prefill phase and no decode phase, only `num_computed_tokens` chasing the tokens of a
request. A long prompt lags far behind and catches up in chunks, a decoding request lags by one
token, a prefix hit starts ahead, a preempted request starts over.

The overlapped loop plans step n+1 before it has seen the tokens of step n. Those tokens are
*pending*: counted, but known to the device only. Nothing else tells the two loops apart.
"""

from __future__ import annotations

import time
from bisect import insort_left, insort_right
from collections.abc import Sequence

from jaxinfer.batch import ScheduledRow, StepPlan, StepResult
from jaxinfer.config import SCHEDULING_POLICIES
from jaxinfer.errors import InvalidRequestError, QueueFullError
from jaxinfer.page_groups import PageGroups, WindowPool
from jaxinfer.page_pool import PagePool, extend_hashes
from jaxinfer.request import (
    FinishReason,
    Pooling,
    Request,
    RequestStatus,
    TokenLogprobs,
    TokenOutput,
)


class Scheduler:
    """Owner of all live requests. `schedule` and `update` are called in turns, with the same plans.

    Attributes:
        num_preemptions: How often a request lost its pages to a better one.
        num_prefix_queries: Tokens looked up in the prefix cache, by newly admitted requests.
        num_prefix_hits: How many of those were found.
        num_corrupted: Requests that ended because their logits held a NaN.
    """

    def __init__(
        self,
        *,
        page_pool: PagePool,
        window_pools: Sequence[WindowPool] = (),
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_mixed_tokens: int | None = None,
        policy: str = "fcfs",
        max_waiting: int | None = None,
    ):
        assert policy in SCHEDULING_POLICIES, policy
        assert max_num_batched_tokens >= max_num_seqs, "running requests would starve"
        self.page_pool = page_pool
        self.pages = PageGroups(page_pool, window_pools)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_mixed_tokens = min(
            max_num_mixed_tokens or max_num_batched_tokens, max_num_batched_tokens
        )
        self.policy = policy
        self.max_waiting = max_waiting
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_corrupted = 0
        # Both queues are in order of rank, best first: the next to run is the first of the one,
        # the next to give way is the last of the other.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._live: dict[str, Request] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def num_computed_tokens(self, request_id: str) -> int | None:
        """Return how many tokens of a live request are computed or in flight, else None."""
        request = self._live.get(request_id)
        return None if request is None else request.num_computed_tokens

    @property
    def live(self) -> tuple[Request, ...]:
        """All requests: those that run, then those that wait, each in the order of their rank."""
        return (*self._running, *self._waiting)

    def add(self, request: Request, *, resumed: bool = False) -> None:
        """Queue a request. Once accepted it will finish: it fits, if need be alone.

        Args:
            request: A new one; or one that was live in another engine, with its output.
            resumed: It was accepted before, so no queue is too long for it.

        Raises:
            InvalidRequestError: It could never run, or its id is taken.
            QueueFullError: `max_waiting` requests wait already.
        """
        limit, most_tokens = request.max_total_tokens, self.pages.most_tokens()
        if request.request_id in self._live:
            message = f"request_id {request.request_id!r} is in use; choose another"
            raise InvalidRequestError(message, "request_id")
        if not 0 < request.num_prompt_tokens < limit:
            message = (
                f"the prompt must have 1 to {limit - 1} tokens, got {request.num_prompt_tokens}"
            )
            raise InvalidRequestError(message, "prompt")
        if limit > most_tokens:
            message = (
                f"prompt and output may need {limit} tokens, but the KV cache has room for"
                f" {most_tokens}; shorten the prompt or lower max_tokens"
            )
            raise InvalidRequestError(message, "max_tokens")
        too_many = self.max_waiting is not None and self.num_waiting >= self.max_waiting
        if too_many and not resumed:
            raise QueueFullError(f"{self.num_waiting} requests are waiting; try again later")
        self._live[request.request_id] = request
        insort_right(self._waiting, request, key=self._rank)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End a request at any time, a step in flight or not; None if there is none of that id."""
        request = self._live.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def schedule(self, max_decode_steps: int = 1) -> StepPlan:
        """Plan a step and count its tokens as computed. An empty plan means: nothing to do now.

        Args:
            max_decode_steps: While nobody waits, that many tokens a request may be planned at once.
        """
        several = self._decode_rows(max_decode_steps) if max_decode_steps > 1 else ()
        if several:
            num_decode_steps = max(row.num_steps for row in several)
            return StepPlan(rows=several, num_decode_steps=num_decode_steps)
        rows: list[ScheduledRow] = []
        num_preemptions_before = self.num_preemptions

        # Running requests first, best first. Each is sure of one token, so that nobody stops
        # decoding while a long prompt catches up; the spare ones go to the best. Pages are taken
        # from the worst, off the end of this list: who stands in the plan never loses them.
        # Beside those that decode prompts take small steps: a decoding request waits for the whole.
        most = self.max_num_batched_tokens
        if any(request.num_lagging_tokens == 1 for request in self._running):
            most = self.max_num_mixed_tokens
        spare = most - len(self._running)
        page_size, has_chunks = self.page_pool.page_size, False
        for request in self._running:
            num_new_tokens = request.num_lagging_tokens
            if num_new_tokens == 1:
                # Most rows of most steps: what `_make_room` and `_advance` come to where there is
                # room and no page to share. A third of the time.
                start = request.num_computed_tokens
                if (
                    start < len(request.page_ids) * page_size
                    and (start + 1) // page_size <= request.num_hashed_pages
                    and not request.window_pages
                ):
                    request.num_computed_tokens = start + 1
                    epoch, pending_row = request.num_preemptions, request.pending_row
                    rows.append(ScheduledRow(request, start, 1, True, epoch, pending_row))
                    continue
            else:
                num_new_tokens = min(num_new_tokens, 1 + spare)
                spare -= num_new_tokens - 1
                has_chunks = True
            if num_new_tokens and self._make_room(request, num_new_tokens):
                rows.append(self._advance(request, num_new_tokens))
        num_preempted = self.num_preemptions - num_preemptions_before

        # Then the queue, strictly in order: whoever does not fit yet holds up those behind, or a
        # long prompt might wait for ever. After a preemption there is nothing to give away.
        while self._waiting and spare and not num_preempted and self._admit(self._waiting[0]):
            request = self._waiting.pop(0)
            insort_right(self._running, request, key=self._rank)
            num_new_tokens = min(request.num_lagging_tokens, spare)
            spare -= num_new_tokens
            has_chunks = True
            rows.append(self._advance(request, num_new_tokens))

        if has_chunks:
            rows.sort(key=lambda row: row.num_scheduled_tokens > 1)
        plan = StepPlan(rows=tuple(rows), num_preempted=num_preempted)
        for index, row in enumerate(plan.sampling_rows):
            request = row.request
            request.num_pending_tokens += 1
            request.pending_row = index
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """Append the sampled tokens and end the requests that are done.

        Of several tokens those behind the one that ended a request are dropped.
        """
        for row in plan.rows if result.prompt_logprobs else ():
            if row.is_current and row.request.first_token_time is None:
                entries = result.prompt_logprobs.get(row.request.request_id, ())
                # By position: a chunk that was computed again replaces its entries.
                first = max(row.start + 1, row.request.first_scored)
                row.request.prompt_logprobs[first:] = entries
        for row in plan.rows if result.pooled else ():
            part = result.pooled.get(row.request.request_id)
            if part is not None and row.is_current:
                so_far = row.request.pooled
                row.request.pooled = part if so_far is None else so_far + part
        for row in plan.rows if result.captured else ():
            chunk = result.captured.get(row.request.request_id)
            if chunk is not None and row.is_current:
                row.request.captured.append(chunk)
        outputs = []
        for row, token_ids, corrupted, logprobs in zip(
            plan.sampling_rows, result.token_ids, result.corrupted, result.logprobs, strict=True
        ):
            request = row.request
            # As `row.is_current`, spelled out: it is asked of every row of every step.
            if request.status is not RequestStatus.RUNNING or request.num_preemptions != row.epoch:
                continue
            if (
                len(token_ids) == row.num_steps == 1
                and logprobs is None
                and request.goes_on_with(token_ids[0])
            ):
                outputs.append(TokenOutput(request.request_id, token_ids))
                continue
            if token_ids:
                outputs.append(self._emit(request, token_ids, logprobs))
            if len(token_ids) != row.num_steps and row.is_current:
                assert corrupted, f"{len(token_ids)} tokens of {row.num_steps} steps, and no end"
                outputs.append(self._fail(row.request))
        return outputs

    def check_integrity(self) -> None:
        """Assert that queues, requests and pages agree; `AssertionError` says what does not."""
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING, request
            held = request.page_ids or request.window_pages
            assert not held, f"waiting, yet holds pages: {request}"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING, request
            assert request.num_computed_tokens <= request.num_tokens_with_pending, request
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=self._rank), "queue out of order"
        queued = sorted(request.request_id for request in self._waiting + self._running)
        assert queued == sorted(self._live), f"live: {sorted(self._live)}, queued: {queued}"
        assert self.num_running <= self.max_num_seqs, f"{self.num_running=}"
        self.pages.check_integrity(self._running)

    def _decode_rows(self, max_steps: int) -> tuple[ScheduledRow, ...]:
        """Return the rows of several decode steps at once; none if it has to be step by step.

        Nobody may wait, be in the middle of a prompt, need the host between tokens or lose pages.
        """
        if self._waiting:
            return ()
        num_steps = min(max_steps, self.max_num_batched_tokens)  # to which window pages are sized
        requests: list[Request] = []
        for request in self._running:
            lag = request.num_lagging_tokens
            if lag:
                num_steps = min(num_steps, request.num_steps_unattended)
                requests.append(request)
            if lag > 1 or num_steps <= 1:
                return ()
        steps = [min(int(num_steps), request.num_tokens_left) for request in requests]
        ends = [(r, r.num_computed_tokens + n) for r, n in zip(requests, steps, strict=True)]
        if max(steps, default=0) <= 1 or not self.pages.grow_all(ends):
            return ()
        rows = []
        for request, n in zip(requests, steps, strict=True):
            row = self._advance(request, 1)
            row.num_steps = n
            request.num_computed_tokens += n - 1
            request.num_pending_tokens += n
            rows.append(row)
        return tuple(rows)

    def _rank(self, request: Request) -> tuple[int, float]:
        """Lower is better; equals keep the order in which they were added."""
        return (request.priority if self.policy == "priority" else 0, request.arrival_time)

    def _make_room(self, request: Request, num_new_tokens: int) -> bool:
        """Get a running request the pages it lacks; False if it was the worst and gave way."""
        end = request.num_computed_tokens + num_new_tokens
        if not request.window_pages and end <= len(request.page_ids) * self.page_pool.page_size:
            return True  # as in all but one of `page_size` steps
        while not self.pages.grow(request, end):
            if self._preempt_worst() is request:
                return False
        return True

    def _preempt_worst(self) -> Request:
        """Take the last one's pages and put it back in front of those that it was in front of."""
        victim = self._running.pop()
        self._leave(victim)
        victim.status = RequestStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        insort_left(self._waiting, victim, key=self._rank)
        return victim

    def _admit(self, request: Request) -> bool:
        """Give a waiting request pages for all its tokens, found or new; False if it must wait.

        All at once, though later chunks will fill them: two prompts admitted into the same free
        pages would end in a preemption.
        """
        if len(self._running) >= self.max_num_seqs:
            return False
        hashes = self._lookup_hashes(request)
        # Each running request keeps a page to grow into, else the newcomer would soon be preempted:
        # 128 requests of 20 to 400 + 50 to 400 tokens in 480 pages of 16 have 9 % of their tokens
        # computed again with this rule, 39 % without, at 2 % more steps.
        if not self.pages.admit(request, hashes, spare=len(self._running)):
            return False
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prefix_queries += len(hashes) * self.page_pool.page_size
            self.num_prefix_hits += request.num_cached_tokens
        return True

    def _advance(self, request: Request, num_new_tokens: int) -> ScheduledRow:
        """Count the tokens as computed and share the pages they fill."""
        assert request.num_pending_tokens <= 1, f"several tokens in flight: {request}"
        start = request.num_computed_tokens
        request.num_computed_tokens = end = start + num_new_tokens
        if end // self.page_pool.page_size > request.num_hashed_pages:
            self._share_full_pages(request, min(end, request.num_tokens))
        samples = end == request.num_tokens_with_pending
        epoch = request.num_preemptions
        return ScheduledRow(request, start, num_new_tokens, samples, epoch, request.pending_row)

    def _lookup_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the pages that need not be computed if somebody else did."""
        pool = self.page_pool
        if not pool.enable_prefix_caching:
            return []
        if request.pooling is Pooling.MEAN:
            return []  # the pages hold keys and values, not the hidden states to be averaged
        if request.hooks is not None:
            return []  # nor what hooks want to see, and edits make them others
        # Even if all is found, the last token has to be computed, for the logits it yields; and
        # logprobs of the prompt need the logits of each token before those that are scored.
        num_tokens = request.num_tokens - 1
        if request.params.prompt_logprobs is not None:
            num_tokens = min(num_tokens, request.first_scored - 1)
        return self._hash_pages(request, num_tokens // pool.page_size)

    def _share_full_pages(self, request: Request, num_tokens: int) -> None:
        """Let others find the pages filled by the first tokens, all computed and known.

        They may be read in this very step: each layer writes all keys and values before it reads
        any. A page that ends in a pending token has to wait for the token's value.
        """
        pool = self.page_pool
        num_pages = num_tokens // pool.page_size
        if request.is_edited:
            return
        if pool.enable_prefix_caching and num_pages > request.num_hashed_pages:
            self.pages.share(request, self._hash_pages(request, num_pages))

    def _hash_pages(self, request: Request, num_pages: int) -> list[bytes]:
        hashes, page_size = request.page_hashes, self.page_pool.page_size
        extend_hashes(hashes, num_pages, request.token_ids, page_size, request.cache_salt)
        return hashes[:num_pages]

    def _emit(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> TokenOutput:
        if request.pooling is not None:
            return self._emit_pooled(request)
        finish_reason, stop_reason, count = None, None, 0
        for token_id in token_ids:
            request.append(token_id)
            count += 1
            finish_reason, stop_reason = request.why_done()
            if finish_reason is not None:
                token_ids = token_ids[:count]
                break
        output = TokenOutput(request.request_id, token_ids)
        if logprobs and request.params.logprobs is not None:
            output.logprobs = logprobs[:count]
        if request.captured:
            output.captured = tuple(request.captured)
            request.captured.clear()
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
            output.num_cached_tokens = request.num_cached_tokens
            output.first_scheduled_time = request.first_scheduled_time
            if request.params.prompt_logprobs is not None:
                output.prompt_logprobs = tuple(request.prompt_logprobs)
                request.prompt_logprobs.clear()
        if finish_reason is not None:
            output.finish_reason, output.stop_reason = finish_reason, stop_reason
            self._finish(request, finish_reason)
        return output

    def _emit_pooled(self, request: Request) -> TokenOutput:
        """End a request for a vector: the prompt is computed, and the token behind it unwanted."""
        count = request.num_prompt_tokens if request.pooling is Pooling.MEAN else 1
        vector = request.pooled / count
        self._finish(request, FinishReason.STOP)
        return TokenOutput(
            request_id=request.request_id,
            finish_reason=FinishReason.STOP,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            pooled=vector,
        )

    def _fail(self, request: Request) -> TokenOutput:
        """End a request that has no next token; nobody shall find what it computed."""
        num_tokens = request.num_tokens
        self.num_corrupted += 1
        self._finish(request, FinishReason.ERROR)
        self.pages.uncache(request.page_hashes)
        own = [("edits", request.is_edited), ("logits processors", request.params.processors)]
        suspects = " or ".join(what for what, has in own if has)
        suspected = f"from the request's {suspects}, or " if suspects else ""
        return TokenOutput(
            request_id=request.request_id,
            finish_reason=FinishReason.ERROR,
            error=f"there is no next token after {num_tokens}: the model's logits held a NaN ("
            f"{suspected}the weights are damaged or overflow; try dtype float32), or bad words and"
            " allowed tokens left nothing to choose from",
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        running = request.status is RequestStatus.RUNNING
        (self._running if running else self._waiting).remove(request)
        del self._live[request.request_id]
        self._leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def _leave(self, request: Request) -> None:
        """Free all pages, even those that the step in flight still writes.

        Steps run in the order of their dispatch: whoever is given the pages next writes later. What
        several decode steps have filled can be found from now on; the newest token was not computed
        if it ended them, whatever was planned.
        """
        self._share_full_pages(request, min(request.num_computed_tokens, request.num_tokens - 1))
        self.pages.release(request)
        request.start_over()
