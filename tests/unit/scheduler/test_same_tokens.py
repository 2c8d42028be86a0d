"""Two ways to the same tokens: however a request is scheduled, it gets what it gets alone."""

import itertools
import random

import pytest

from jaxinfer.page_pool import PagePool
from jaxinfer.scheduler import Scheduler
from tests.fakes import (
    VOCAB_SIZE,
    FakeRunner,
    StepLoop,
    expected_prompt_logprobs,
    expected_tokens,
    make_request,
)

PAGE_SIZE = 4


def make_loop(
    *,
    overlap=False,
    num_pages=512,
    page_size=PAGE_SIZE,
    caching=True,
    max_num_seqs=16,
    budget=64,
    policy="fcfs",
    **runner,
):
    pool = PagePool(num_pages, page_size, caching)
    scheduler = Scheduler(
        page_pool=pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, policy=policy
    )
    return StepLoop(scheduler, FakeRunner(num_pages, page_size, **runner), overlap=overlap)


def make_requests(count=24, seed=0):
    """Return requests of mixed lengths, a third of which share long prefixes."""
    rng = random.Random(seed)
    families = [rng.choices(range(VOCAB_SIZE), k=40) for _ in range(2)]
    requests = []
    for i in range(count):
        prompt = rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 3, 4, 5, 17, 70]))
        if i % 3 == 0:
            prompt = rng.choice(families)[: rng.randint(1, 40)] + prompt[:5]
        requests.append(
            make_request(
                f"r{i}",
                prompt,
                seed=i % 4,
                max_tokens=rng.choice([1, 2, 9, 30]),
                eos_token_ids=[1, 2] if i % 2 else [],
                priority=rng.randint(0, 2),
                prompt_logprobs=1 if i % 7 == 0 else None,
            )
        )
    return requests


def run(loop, requests):
    for request in requests:
        loop.scheduler.add(request)
    tokens = loop.run()
    loop.scheduler.check_integrity()
    assert loop.scheduler.page_pool.num_used == 0
    return tokens


def expected(requests):
    return {request.request_id: expected_tokens(request) for request in requests}


both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


@both_loops
def test_batched_tokens_equal_those_alone(overlap):
    requests = make_requests()
    assert run(make_loop(overlap=overlap), requests) == expected(requests)


@both_loops
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16])
def test_chunked_prompt_gives_the_tokens_of_one_shot(overlap, budget):
    requests = make_requests(8)
    loop = make_loop(overlap=overlap, budget=budget, max_num_seqs=min(budget, 4))
    assert run(loop, requests) == expected(requests)
    assert max(plan.num_tokens for plan in loop.plans) <= budget


@both_loops
@pytest.mark.parametrize("caching", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_requests_resume_with_the_same_tokens(overlap, caching, budget, policy):
    requests = make_requests()
    loop = make_loop(
        overlap=overlap, caching=caching, budget=budget, policy=policy, num_pages=25, max_num_seqs=8
    )
    assert run(loop, requests) == expected(requests)
    assert loop.scheduler.num_preemptions > 0


@both_loops
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_page_size_does_not_change_tokens(overlap, page_size):
    requests = make_requests(12)
    loop = make_loop(overlap=overlap, page_size=page_size, num_pages=256 // page_size)
    assert run(loop, requests) == expected(requests)


@both_loops
@pytest.mark.parametrize("num_extra", [0, 1, 3, 4, 5])
def test_cached_prompt_gives_the_tokens_of_a_cold_one(overlap, num_extra):
    loop = make_loop(overlap=overlap)
    prompt = list(range(8 + num_extra))
    run(loop, [make_request("cold", prompt, max_tokens=9)])
    num_run_cold = loop.runner.num_tokens_run

    # Of 8 tokens in full pages all but the last page may be reused: one token must be computed.
    warm = make_request("warm", prompt, max_tokens=9)
    tokens = run(loop, [warm])
    assert tokens["warm"] == tokens["cold"] == expected_tokens(warm)
    assert warm.num_cached_tokens == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    num_run_warm = loop.runner.num_tokens_run - num_run_cold
    assert num_run_warm == num_run_cold - warm.num_cached_tokens


@both_loops
def test_output_pages_are_reused_by_the_next_turn(overlap):
    loop = make_loop(overlap=overlap)
    turn = make_request("turn", range(10), max_tokens=20)
    tokens = run(loop, [turn])["turn"]
    follow_up = make_request("follow-up", [*range(10), *tokens, 5, 6, 7], max_tokens=5)
    assert run(loop, [follow_up])["follow-up"] == expected_tokens(follow_up)
    assert follow_up.num_cached_tokens == 28


def test_prompts_admitted_together_share_pages_in_the_same_step():
    loop = make_loop()
    twins = [make_request(f"twin{i}", range(14), seed=i, max_tokens=3) for i in range(3)]
    assert run(loop, twins) == expected(twins)
    assert [row.num_scheduled_tokens for row in loop.plans[0].rows] == [14, 2, 2]
    assert [twin.num_cached_tokens for twin in twins] == [0, 12, 12]


def test_hits_are_given_only_to_the_same_salt():
    loop = make_loop()
    salts = ["", "alice", "bob", "alice"]
    requests = [
        make_request(f"r{i}", range(9), cache_salt=salt, max_tokens=2)
        for i, salt in enumerate(salts)
    ]
    assert run(loop, requests) == expected(requests)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 8]


def test_same_page_after_another_prefix_is_no_hit():
    loop = make_loop()
    requests = [
        make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=3),
        make_request("b", [9, 9, 9, 9, 5, 6, 7, 8, 9], max_tokens=3),
    ]
    assert run(loop, requests) == expected(requests)
    assert requests[1].num_cached_tokens == 0


@both_loops
@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_come_once_and_whole(overlap, budget):
    loop = make_loop(overlap=overlap, budget=budget, max_num_seqs=3)
    requests = [
        make_request("first", range(13), max_tokens=3, prompt_logprobs=1),
        make_request("cached", range(13), max_tokens=3, prompt_logprobs=1),
        make_request("short", [5], max_tokens=3, prompt_logprobs=0),
    ]
    run(loop, requests)
    for request in requests:
        mine = [out for out in loop.outputs if out.request_id == request.request_id]
        assert mine[0].prompt_logprobs == expected_prompt_logprobs(request)
        assert all(out.prompt_logprobs is None for out in mine[1:])
        assert request.num_cached_tokens == 0


@both_loops
def test_prompt_logprobs_survive_preemption(overlap):
    # The second prompt is halfway when the first request needs a seventh page.
    loop = make_loop(overlap=overlap, budget=3, num_pages=11, max_num_seqs=2)
    requests = [
        make_request(f"r{i}", range(i, i + 17), max_tokens=12, prompt_logprobs=1) for i in range(4)
    ]
    assert run(loop, requests) == expected(requests)
    assert loop.scheduler.num_preemptions > 0
    got = [out for out in loop.outputs if out.prompt_logprobs is not None]
    assert {out.request_id: out.prompt_logprobs for out in got} == {
        request.request_id: expected_prompt_logprobs(request) for request in requests
    }
    assert len(got) == len(requests)


@both_loops
@pytest.mark.parametrize("after", range(14))
def test_abort_at_each_stage_leaves_the_others_alone(overlap, after):
    """The stages: waiting, in a chunk, sampled but pending, decoding, preempted, last token due."""
    loop = make_loop(overlap=overlap, budget=8, num_pages=16, max_num_seqs=4)
    requests = [make_request(f"r{i}", range(i, i + 11), max_tokens=10) for i in range(5)]
    for request in requests:
        loop.scheduler.add(request)
    for _ in range(after):
        loop.step()
    aborted = [r for r in requests[1::2] if loop.scheduler.abort(r.request_id) is not None]
    loop.scheduler.check_integrity()
    before = loop.tokens()
    tokens = loop.run()
    for request in requests:
        got = tokens.get(request.request_id, [])
        if request in aborted:
            assert got == before.get(request.request_id, [])
            assert got == expected_tokens(request)[: len(got)]
        else:
            assert got == expected_tokens(request)
    assert loop.scheduler.page_pool.num_used == 0


@both_loops
def test_id_can_be_used_again_while_the_aborted_row_is_in_flight(overlap):
    loop = make_loop(overlap=overlap)
    loop.scheduler.add(make_request("same", range(6), seed=1, max_tokens=8))
    for _ in range(3):
        loop.step()
    loop.scheduler.abort("same")
    already = len(loop.tokens()["same"])
    again = make_request("same", range(20), seed=2, max_tokens=8)
    loop.scheduler.add(again)
    assert loop.run()["same"][already:] == expected_tokens(again)


@both_loops
def test_corrupted_request_ends_with_an_error_and_hurts_nobody(overlap):
    def corrupt(request, position):
        return request.request_id == "bad" and position >= 14

    loop = make_loop(overlap=overlap, corrupt=corrupt)
    bad = make_request("bad", range(12), max_tokens=10)
    good = make_request("good", range(30, 45), max_tokens=10)
    assert run(loop, [bad, good])["good"] == expected_tokens(good)
    last = [out for out in loop.outputs if out.request_id == "bad"][-1]
    assert last.finish_reason == "error"
    assert last.new_token_ids == ()
    assert "NaN" in last.error
    assert loop.scheduler.num_corrupted == 1

    later = make_request("later", range(12), max_tokens=10)
    assert run(loop, [later])["later"] == expected_tokens(later)
    assert later.num_cached_tokens == 0, "nobody may find the pages of a corrupted request"


def test_overlapped_loop_takes_the_same_number_of_tokens_per_request():
    """It runs at most one row too many: the one in flight when an end token arrives."""
    counts = []
    for overlap in (False, True):
        requests = make_requests(12)
        loop = make_loop(overlap=overlap, caching=False)
        run(loop, requests)
        counts.append(loop.runner.num_tokens_run)
    stopped_early = sum(r.finish_reason == "stop" for r in requests)
    assert counts[0] <= counts[1] <= counts[0] + stopped_early
    assert stopped_early


@pytest.mark.parametrize("seed", range(6))
def test_every_setting_gives_the_same_tokens(seed):
    requests = make_requests(16, seed)
    want = expected(requests)
    for overlap, caching, (num_pages, budget) in itertools.product(
        (False, True), (False, True), [(32, 8), (40, 512), (512, 8)]
    ):
        loop = make_loop(
            overlap=overlap, caching=caching, num_pages=num_pages, budget=budget, max_num_seqs=8
        )
        assert run(loop, make_requests(16, seed)) == want
