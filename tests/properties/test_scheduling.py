"""Whatever happens in whatever order, no page is lost and each request gets its own tokens.

A state machine drives the real `Scheduler` and `PagePool` with a `FakeRunner`, in both loops, in
pools from roomy to just large enough for one request, for models with and without windows.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.errors import InvalidRequestError
from jaxinfer.page_groups import WindowPool, most_window_pages
from jaxinfer.page_pool import PagePool
from jaxinfer.request import FinishReason, Request
from jaxinfer.scheduler import Scheduler
from tests.fakes import (
    FakeRunner,
    StepLoop,
    expected_prompt_logprobs,
    expected_tokens,
    make_request,
)

# Prompts are drawn from few tokens and grow out of each other, so that prefixes are shared.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(lambda bits: bits * 2)


class SchedulingMachine(RuleBasedStateMachine):
    @initialize(
        overlap=st.booleans(),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        page_size=st.sampled_from([1, 2, 4]),
        num_slots=st.sampled_from([32, 48, 64, 256]),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.sampled_from([0, 1, 3, 30]),
        windows=st.sampled_from([(), (), (1,), (5,), (8,), (3, 11)]),
        spare_window_pages=st.sampled_from([0, 3, 100]),
        decode_steps=st.sampled_from([1, 2, 4, 8]),
    )
    def start(
        self,
        overlap,
        caching,
        policy,
        page_size,
        num_slots,
        max_num_seqs,
        spare_budget,
        windows,
        spare_window_pages,
        decode_steps,
    ):
        num_pages = num_slots // page_size
        self.budget = max_num_seqs + spare_budget
        self.max_num_seqs = max_num_seqs
        self.windows = windows
        window_pools = []
        for window in windows:
            # One sequence fits always.
            most = min(most_window_pages(window, self.budget, page_size), num_pages)
            window_pools.append(
                WindowPool(
                    most + spare_window_pages,
                    page_size,
                    caching,
                    window=window,
                    max_num_batched_tokens=self.budget,
                )
            )
        self.scheduler = Scheduler(
            page_pool=PagePool(num_pages, page_size, caching),
            window_pools=window_pools,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            policy=policy,
        )
        runner = FakeRunner(
            num_pages, page_size, window_pools=window_pools, corrupt=self.is_corrupt
        )
        self.loop = StepLoop(
            self.scheduler, runner, overlap=overlap, max_steps=2000, decode_steps=decode_steps
        )
        self.requests: dict[str, Request] = {}
        self.corrupt_after: dict[str, int] = {}
        self.aborted: set[str] = set()

    def is_corrupt(self, request, position):
        return position >= self.corrupt_after.get(request.request_id, 10**9)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 14),
        eos=st.sampled_from([(), tuple(range(20))]),
        seed=st.integers(0, 1),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(0, 2),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        logprobs=st.sampled_from([None, None, 1]),
        min_tokens=st.sampled_from([0, 0, 5]),
        phrases=st.sampled_from([None] * 5 + [[[100, 101]]]),
        corrupt_after=st.sampled_from([None] * 7 + [8]),
    )
    def add(
        self,
        prompt,
        max_tokens,
        eos,
        seed,
        salt,
        priority,
        prompt_logprobs,
        logprobs,
        min_tokens,
        phrases,
        corrupt_after,
    ):
        request_id = f"r{len(self.requests)}"
        request = make_request(
            request_id,
            prompt,
            seed=seed,
            max_tokens=max_tokens,
            eos_token_ids=eos,
            priority=priority,
            # A damaged prefix damages whoever shares it; here only one request is to be hurt.
            cache_salt=salt if corrupt_after is None else request_id,
            prompt_logprobs=prompt_logprobs,
            logprobs=logprobs,
            min_tokens=min(min_tokens, max_tokens),
            # Never met, yet the host has to look.
            bad_words_token_ids=phrases,
        )
        pool = self.scheduler.page_pool
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            assert request.max_total_tokens > pool.num_pages * pool.page_size
            return
        self.requests[request_id] = request
        if corrupt_after is not None:
            self.corrupt_after[request_id] = corrupt_after

    @precondition(lambda self: any(r.finish_reason for r in self.requests.values()))
    @rule(data=st.data(), max_tokens=st.integers(1, 14))
    def reply(self, data, max_tokens):
        """The next turn of a conversation: its prefix is what another request ended with."""
        over = [name for name, r in self.requests.items() if r.finish_reason]
        said = self.requests[data.draw(st.sampled_from(sorted(over)))]
        self.add(
            prompt=[*said.token_ids, 1],
            max_tokens=max_tokens,
            eos=tuple(range(20)),
            seed=0,
            salt=said.cache_salt,
            priority=0,
            prompt_logprobs=None,
            logprobs=None,
            min_tokens=0,
            phrases=None,
            corrupt_after=self.corrupt_after.get(said.request_id),
        )

    @precondition(lambda self: self.loop.has_unfinished)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.loop.step()
            self.scheduler.check_integrity()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.scheduler.abort(request_id) is not None:
            self.aborted.add(request_id)

    @invariant()
    def pages_and_queues_agree(self):
        self.scheduler.check_integrity()

    @invariant()
    def no_step_is_too_large(self):
        for plan in self.loop.plans[-6:]:
            assert plan.num_tokens <= self.budget
            assert len(plan.rows) <= self.max_num_seqs
            assert [row.num_scheduled_tokens > 1 for row in plan.rows] == sorted(
                row.num_scheduled_tokens > 1 for row in plan.rows
            )
            assert plan.num_decode_steps <= self.loop.decode_steps
            if plan.num_decode_steps > 1:
                assert all(row.samples and row.num_scheduled_tokens == 1 for row in plan.rows)
                assert not any(row.request.params.bad_words_token_ids for row in plan.rows)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        tokens = self.loop.run()
        self.scheduler.check_integrity()
        assert self.scheduler.pages.num_used == 0
        for request_id, request in self.requests.items():
            got, want = tokens.get(request_id, []), expected_tokens(request, self.windows)
            outputs = [out for out in self.loop.outputs if out.request_id == request_id]
            limit = self.corrupt_after.get(request_id, 10**9) - request.num_prompt_tokens
            if request_id in self.aborted:
                assert request.finish_reason is FinishReason.ABORT
                assert got == want[: len(got)]
                assert not any(output.finished for output in outputs)
            elif limit < len(want):
                assert request.finish_reason is FinishReason.ERROR
                assert got == want[: max(limit, 0)]
            else:
                assert got == want
                assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]
                assert all(1 <= len(out.new_token_ids) <= self.loop.decode_steps for out in outputs)
            asked = request.params.logprobs is not None
            for out in outputs:
                assert len(out.logprobs or ()) == asked * len(out.new_token_ids)
            if got and request.params.prompt_logprobs is not None:
                expected = expected_prompt_logprobs(request, self.windows)
                assert outputs[0].prompt_logprobs == expected


TestScheduling = SchedulingMachine.TestCase
TestScheduling.settings = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
