"""Who runs when, who gives way, who is refused, and how a request ends."""

import random

import pytest

from jaxinfer.batch import StepResult
from jaxinfer.errors import InvalidRequestError, QueueFullError
from jaxinfer.page_pool import PagePool
from jaxinfer.request import FinishReason, RequestStatus
from jaxinfer.scheduler import Scheduler
from tests.fakes import FakeRunner, StepLoop, expected_tokens, make_request


def make_scheduler(num_pages=64, page_size=4, budget=32, max_num_seqs=8, caching=False, **kwargs):
    return Scheduler(
        page_pool=PagePool(num_pages, page_size, caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **kwargs,
    )


def result(plan, token_id=5):
    count = len(plan.sampling_rows)
    return StepResult(
        token_ids=((token_id,),) * count, corrupted=(False,) * count, logprobs=(None,) * count
    )


def step(scheduler, token_id=5):
    plan = scheduler.schedule()
    return plan, scheduler.update(plan, result(plan, token_id))


def shares(plan):
    return {row.request.request_id: row.num_scheduled_tokens for row in plan.rows}


class TestAdmission:
    def test_request_that_can_never_fit_is_refused_at_once(self):
        scheduler = make_scheduler(num_pages=4)
        scheduler.add(make_request("fits", range(10), max_tokens=6))
        with pytest.raises(InvalidRequestError, match="need 17 tokens.* room for 16") as caught:
            scheduler.add(make_request("never", range(10), max_tokens=7))
        assert caught.value.param == "max_tokens"
        assert scheduler.num_waiting == 1

    @pytest.mark.parametrize(("length", "limit"), [(0, 8), (8, 8), (9, 8)])
    def test_prompt_must_leave_room_for_a_token(self, length, limit):
        with pytest.raises(InvalidRequestError, match="prompt") as caught:
            make_scheduler().add(make_request("r", range(length), max_total_tokens=limit))
        assert caught.value.param == "prompt"

    def test_full_queue_is_not_now_rather_than_never(self):
        scheduler = make_scheduler(max_waiting=2)
        for i in range(2):
            scheduler.add(make_request(f"r{i}", range(4)))
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            scheduler.add(make_request("r2", range(4)))
        step(scheduler)
        scheduler.add(make_request("r2", range(4)))

    def test_id_is_unique_among_live_requests_only(self):
        scheduler = make_scheduler()
        scheduler.add(make_request("r", range(4), max_tokens=1))
        with pytest.raises(InvalidRequestError, match="in use") as caught:
            scheduler.add(make_request("r", range(5)))
        assert caught.value.param == "request_id"
        step(scheduler)
        scheduler.add(make_request("r", range(5)))

    def test_prompt_waits_until_all_of_it_fits(self):
        scheduler = make_scheduler(num_pages=6, budget=8)
        scheduler.add(make_request("first", range(8), max_tokens=3))
        scheduler.add(make_request("second", range(20), max_tokens=2))
        assert shares(step(scheduler)[0]) == {"first": 8}
        assert scheduler.num_waiting == 1
        while scheduler.num_waiting:
            plan, _ = step(scheduler)
        assert shares(plan) == {"second": 8}

    def test_second_prompt_is_not_promised_the_first_ones_pages(self):
        scheduler = make_scheduler(num_pages=8, budget=8)
        for name in ("first", "second"):
            scheduler.add(make_request(name, range(24), max_tokens=2))
        for _ in range(3):
            assert list(shares(step(scheduler)[0])) == ["first"]
        assert scheduler.num_preemptions == 0

    def test_newcomer_leaves_each_running_request_a_page_to_grow_into(self):
        scheduler = make_scheduler(num_pages=6)
        for name in ("first", "second"):
            scheduler.add(make_request(name, range(7), max_tokens=5))
        scheduler.add(make_request("third", [1], max_tokens=5))
        assert list(shares(step(scheduler)[0])) == ["first", "second"]
        while scheduler.has_unfinished:
            step(scheduler)
        assert scheduler.num_preemptions == 0

    def test_small_request_does_not_overtake_a_large_one(self):
        scheduler = make_scheduler(num_pages=6)
        scheduler.add(make_request("running", range(15), max_tokens=8))
        step(scheduler)
        scheduler.add(make_request("large", range(16), max_tokens=2))
        scheduler.add(make_request("small", range(2), max_tokens=2))
        assert shares(step(scheduler)[0]) == {"running": 1}
        assert scheduler.num_waiting == 2

    def test_at_most_max_num_seqs_run(self):
        scheduler = make_scheduler(max_num_seqs=2)
        for i in range(3):
            scheduler.add(make_request(f"r{i}", range(3), max_tokens=2))
        assert list(shares(step(scheduler)[0])) == ["r0", "r1"]
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)

    def test_hits_on_idle_pages_do_not_count_twice(self):
        """Six pages, four of them idle and wanted: two, not six, are left for the rest."""
        scheduler = make_scheduler(num_pages=6, caching=True, budget=64)
        scheduler.add(make_request("past", range(17), max_tokens=1))
        step(scheduler)
        assert scheduler.page_pool.num_cached == 4
        scheduler.add(make_request("again", [*range(16), 50, 51], max_tokens=6))
        scheduler.add(make_request("other", range(60, 65), max_tokens=2))
        assert shares(step(scheduler)[0]) == {"again": 2}
        scheduler.check_integrity()


class TestBudget:
    def test_prompts_take_small_steps_beside_those_that_decode_and_large_ones_alone(self):
        scheduler = make_scheduler(budget=20, max_num_mixed_tokens=8)
        scheduler.add(make_request("first", range(30), max_tokens=3))
        assert [shares(step(scheduler)[0]) for _ in range(2)] == [{"first": 20}, {"first": 10}]
        scheduler.add(make_request("second", range(30), max_tokens=2))
        assert shares(step(scheduler)[0]) == {"first": 1, "second": 7}
        assert shares(step(scheduler)[0]) == {"first": 1, "second": 7}
        assert shares(step(scheduler)[0]) == {"second": 16}

    def test_chunks_and_decodes_share_a_step_one_token_rows_first(self):
        scheduler = make_scheduler(budget=10)
        scheduler.add(make_request("decoding", range(3)))
        step(scheduler)
        scheduler.add(make_request("long", range(25)))
        scheduler.add(make_request("one", [1]))
        plan, _ = step(scheduler)
        assert shares(plan) == {"decoding": 1, "long": 9}
        step(scheduler)
        plan, _ = step(scheduler)
        assert list(shares(plan).items()) == [("decoding", 1), ("one", 1), ("long", 7)]
        assert plan.num_decode_rows == 2

    def test_only_the_last_chunk_samples(self):
        scheduler = make_scheduler(budget=8)
        scheduler.add(make_request("r", range(20), max_tokens=2))
        assert [step(scheduler)[0].rows[0].samples for _ in range(4)] == [False, False, True, True]

    def test_long_prompt_of_better_priority_does_not_stop_decoding(self):
        scheduler = make_scheduler(budget=8, policy="priority")
        for i in range(3):
            scheduler.add(make_request(f"low{i}", range(2), priority=5))
        step(scheduler)
        scheduler.add(make_request("high", range(30), priority=0))
        step(scheduler)
        for _ in range(4):
            plan, _ = step(scheduler)
            assert shares(plan) == {"high": 5, "low0": 1, "low1": 1, "low2": 1}

    def test_tokens_that_a_running_request_cannot_use_go_to_others(self):
        scheduler = make_scheduler(budget=8)
        scheduler.add(make_request("ends", range(2), max_tokens=1))
        scheduler.add(make_request("long", range(30)))
        assert shares(scheduler.schedule()) == {"ends": 2, "long": 6}
        assert shares(scheduler.schedule()) == {"long": 8}

    def test_request_never_runs_past_its_limit(self):
        """Overlapped: while its last token is in flight there is nothing more to compute."""
        scheduler = make_scheduler()
        scheduler.add(make_request("r", range(4), max_tokens=2))
        first = scheduler.schedule()
        second = scheduler.schedule()
        assert second.rows[0].pending_row == 0
        scheduler.update(first, result(first))
        assert not scheduler.schedule()
        (output,) = scheduler.update(second, result(second))
        assert output.finish_reason is FinishReason.LENGTH

    def test_pending_row_is_the_place_among_the_previous_steps_sampling_rows(self):
        scheduler = make_scheduler(budget=8, max_num_seqs=4)
        scheduler.add(make_request("chunk", range(20), arrival_time=2))
        for i in range(2):
            scheduler.add(make_request(f"r{i}", range(2), arrival_time=i / 2))
        first = scheduler.schedule()
        assert shares(first) == {"r0": 2, "r1": 2, "chunk": 4}
        second = scheduler.schedule()
        pending = {row.request.request_id: row.pending_row for row in second.rows}
        assert pending == {"r0": 0, "r1": 1, "chunk": -1}


class TestPreemption:
    def test_latest_arrival_gives_way_and_comes_back_first(self):
        scheduler = make_scheduler(num_pages=8, budget=32)
        for i in range(3):
            scheduler.add(make_request(f"r{i}", range(8), max_tokens=8))
        scheduler.add(make_request("queued", range(2), max_tokens=2))
        step(scheduler)
        plan, _ = step(scheduler)
        assert plan.num_preempted == 1
        assert list(shares(plan)) == ["r0", "r1"]
        assert [r.request_id for r in scheduler._waiting] == ["r2", "queued"]

    def test_request_may_have_to_preempt_itself(self):
        scheduler = make_scheduler(num_pages=5, budget=32)
        scheduler.add(make_request("first", range(8), max_tokens=6))
        last = make_request("last", range(8), max_tokens=6)
        scheduler.add(last)
        step(scheduler)
        plan, _ = step(scheduler)
        assert list(shares(plan)) == ["first"]
        assert last.status is RequestStatus.WAITING
        assert (last.num_computed_tokens, last.num_tokens, last.page_ids) == (0, 9, [])

    def test_nobody_is_admitted_in_a_step_that_preempts(self):
        scheduler = make_scheduler(num_pages=6, budget=32, policy="priority")
        scheduler.add(make_request("first", range(8), max_tokens=6, priority=1))
        scheduler.add(make_request("second", range(11), max_tokens=6, priority=1))
        step(scheduler)
        step(scheduler)
        scheduler.add(make_request("urgent", [1], max_tokens=1, priority=0))
        plan, _ = step(scheduler)
        assert plan.num_preempted == 1
        assert list(shares(plan)) == ["first"]
        assert list(shares(step(scheduler)[0])) == ["first", "urgent"]

    def test_worst_priority_gives_way_whoever_came_first(self):
        scheduler = make_scheduler(num_pages=8, budget=32, policy="priority")
        for name, priority in [("low", 9), ("high", 1), ("mid", 5)]:
            scheduler.add(make_request(name, range(8), max_tokens=8, priority=priority))
        step(scheduler)
        plan, _ = step(scheduler)
        assert list(shares(plan)) == ["high", "mid"]

    def test_result_of_an_earlier_epoch_is_dropped(self):
        scheduler = make_scheduler(num_pages=5, budget=32)
        scheduler.add(make_request("first", range(8), max_tokens=8))
        victim = make_request("victim", range(8), max_tokens=8)
        scheduler.add(victim)
        first = scheduler.schedule()
        second = scheduler.schedule()
        assert second.num_preempted == 1
        outputs = scheduler.update(first, result(first))
        assert [output.request_id for output in outputs] == ["first"]
        assert victim.output_token_ids == []
        scheduler.check_integrity()

    def test_result_of_an_earlier_epoch_is_dropped_even_if_the_request_runs_again(self):
        scheduler = make_scheduler(num_pages=5, budget=32)
        scheduler.add(make_request("first", range(8), max_tokens=8))
        victim = make_request("victim", range(8), max_tokens=8)
        scheduler.add(victim)
        plans = [scheduler.schedule(), scheduler.schedule()]
        scheduler.abort("first")
        plans.append(scheduler.schedule())
        assert victim.status is RequestStatus.RUNNING
        assert [len(scheduler.update(plan, result(plan))) for plan in plans] == [0, 0, 1]
        assert victim.output_token_ids == [5]

    def test_low_and_high_priority_in_a_small_pool_all_finish_best_first(self):
        """15 low and 5 high priority requests crashed an engine of the field."""
        scheduler = make_scheduler(num_pages=16, policy="priority", max_num_seqs=8, caching=True)
        loop = StepLoop(scheduler, FakeRunner(16, 4), overlap=True)
        low = [
            make_request(f"low{i}", range(i, i + 9), max_tokens=20, priority=9) for i in range(15)
        ]
        high = [make_request(f"high{i}", range(i, i + 7), max_tokens=20) for i in range(5)]
        for request in low:
            scheduler.add(request)
        for _ in range(6):
            loop.step()
        for request in high:
            scheduler.add(request)
        tokens = loop.run()
        assert tokens == {r.request_id: expected_tokens(r) for r in low + high}
        assert scheduler.num_preemptions > 0
        order = [out.request_id for out in loop.outputs if out.finished]
        assert max(order.index(r.request_id) for r in high) < len(order) - 8


class TestOrder:
    def test_priority_then_arrival(self):
        scheduler = make_scheduler(max_num_seqs=1, policy="priority")
        for name, priority, arrival in [("d", 2, 0), ("b", 1, 2), ("a", 1, 1), ("c", 1, 2)]:
            scheduler.add(
                make_request(name, [1], max_tokens=1, priority=priority, arrival_time=arrival)
            )
        order = []
        while scheduler.has_unfinished:
            order += [output.request_id for output in step(scheduler)[1]]
        assert order == ["a", "b", "c", "d"]

    def test_fcfs_ignores_priority(self):
        scheduler = make_scheduler(max_num_seqs=1)
        for i in range(3):
            scheduler.add(make_request(f"r{i}", [1], max_tokens=1, priority=-i))
        order = []
        while scheduler.has_unfinished:
            order += [output.request_id for output in step(scheduler)[1]]
        assert order == ["r0", "r1", "r2"]


class TestEnd:
    def run_one(self, token_id=5, **kwargs):
        scheduler = make_scheduler()
        request = make_request("r", range(4), **kwargs)
        scheduler.add(request)
        outputs = []
        while scheduler.has_unfinished:
            outputs += step(scheduler, token_id)[1]
        assert all(not output.finished for output in outputs[:-1])
        assert request.finish_reason is outputs[-1].finish_reason
        assert scheduler.page_pool.num_used == 0
        return outputs

    def test_end_of_sequence_stops_without_a_reason(self):
        (output,) = self.run_one(eos_token_ids=[5])
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)
        assert output.new_token_ids == (5,)

    def test_stop_token_is_the_reason(self):
        (output,) = self.run_one(stop_token_ids=[5])
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 5)

    def test_length(self):
        outputs = self.run_one(max_tokens=3)
        assert len(outputs) == 3
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.LENGTH, None)

    def test_stop_on_the_last_token_allowed_is_a_stop(self):
        (output,) = self.run_one(max_tokens=1, eos_token_ids=[5])
        assert output.finish_reason is FinishReason.STOP

    def test_ignore_eos_goes_on_but_heeds_stop_token_ids(self):
        assert len(self.run_one(eos_token_ids=[5], ignore_eos=True, max_tokens=3)) == 3
        assert len(self.run_one(stop_token_ids=[5], ignore_eos=True, max_tokens=3)) == 1

    def test_min_tokens_come_before_any_stop(self):
        outputs = self.run_one(eos_token_ids=[5], min_tokens=2, max_tokens=9)
        assert len(outputs) == 3

    def test_abort_says_why_and_only_once(self):
        scheduler = make_scheduler()
        request = make_request("r", range(4))
        scheduler.add(request)
        plan = scheduler.schedule()
        assert scheduler.abort("r", FinishReason.STOP) is request
        assert request.finish_reason is FinishReason.STOP
        assert scheduler.abort("r") is None
        assert scheduler.update(plan, result(plan)) == []
        assert not scheduler.has_unfinished
        scheduler.check_integrity()

    def test_end_token_in_flight_overlap_frees_pages_once(self):
        scheduler = make_scheduler()
        scheduler.add(make_request("r", range(4), eos_token_ids=[5]))
        first = scheduler.schedule()
        second = scheduler.schedule()
        assert len(second.rows) == 1
        (output,) = scheduler.update(first, result(first))
        assert output.finished
        assert scheduler.update(second, result(second)) == []
        scheduler.check_integrity()


class TestBookkeeping:
    def test_logprobs_only_if_asked(self):
        scheduler = make_scheduler()
        loop = StepLoop(scheduler, FakeRunner(64, 4), overlap=False)
        scheduler.add(make_request("with", range(4), max_tokens=2, logprobs=0))
        scheduler.add(make_request("without", range(4), max_tokens=2))
        loop.run()
        for output in loop.outputs:
            assert (output.logprobs is not None) == (output.request_id == "with")
            assert output.prompt_logprobs is None

    def test_times_are_set_once(self):
        scheduler = make_scheduler()
        request = make_request("r", range(4), max_tokens=4)
        scheduler.add(request)
        assert request.first_scheduled_time is None
        step(scheduler)
        times = request.first_scheduled_time, request.first_token_time
        assert times[0] <= times[1]
        step(scheduler)
        assert (request.first_scheduled_time, request.first_token_time) == times

    def test_cache_counters_count_first_admissions_only(self):
        scheduler = make_scheduler(num_pages=12, caching=True, budget=64)
        loop = StepLoop(scheduler, FakeRunner(12, 4), overlap=False)
        first = make_request("first", range(18), max_tokens=10)
        second = make_request("second", range(18), seed=1, max_tokens=20)
        third = make_request("third", range(50, 54), max_tokens=20)
        for request in (first, second, third):
            scheduler.add(request)
        loop.run()
        assert scheduler.num_preemptions > 0
        assert (scheduler.num_prefix_queries, scheduler.num_prefix_hits) == (32, 16)
        assert [r.num_cached_tokens for r in (first, second, third)] == [0, 16, 0]

    def test_integrity_check_sees_a_request_without_pages(self):
        scheduler = make_scheduler()
        request = make_request("r", range(4))
        scheduler.add(request)
        step(scheduler)
        scheduler.page_pool.free(request.page_ids)
        request.page_ids = []
        with pytest.raises(AssertionError, match="tokens without a page"):
            scheduler.check_integrity()

    def test_waiting_requests_hold_nothing_however_often_they_are_refused(self):
        rng = random.Random(0)
        scheduler = make_scheduler(num_pages=8, caching=True, budget=16, max_num_seqs=4)
        loop = StepLoop(scheduler, FakeRunner(8, 4), overlap=True)
        for i in range(12):
            scheduler.add(make_request(f"r{i}", range(rng.randint(1, 20)), max_tokens=10))
        while loop.has_unfinished:
            loop.step()
            scheduler.check_integrity()
