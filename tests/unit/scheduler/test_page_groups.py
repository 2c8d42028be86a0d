"""Layers with a window hold what they can still see: no less, and not much more."""

import itertools
import random

import pytest

from jaxinfer.batch import StepResult
from jaxinfer.errors import InvalidRequestError
from jaxinfer.page_groups import WindowPool, most_window_pages
from jaxinfer.page_pool import PagePool, page_hash
from jaxinfer.scheduler import Scheduler
from tests.fakes import FakeRunner, StepLoop, expected_tokens, make_request

WINDOWS = (5, 12)


def make_scheduler(
    num_pages=256,
    num_window_pages=256,
    page_size=4,
    windows=WINDOWS,
    caching=True,
    budget=16,
    max_num_seqs=8,
):
    return Scheduler(
        page_pool=PagePool(num_pages, page_size, caching),
        window_pools=[
            WindowPool(
                num_window_pages, page_size, caching, window=window, max_num_batched_tokens=budget
            )
            for window in windows
        ],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )


def make_loop(overlap=False, **settings):
    scheduler = make_scheduler(**settings)
    pages = scheduler.pages
    runner = FakeRunner(pages.full.num_pages, pages.full.page_size, window_pools=pages.windows)
    return StepLoop(scheduler, runner, overlap=overlap)


def run(loop, requests):
    for request in requests:
        loop.scheduler.add(request)
    while loop.has_unfinished:
        loop.step()
        loop.scheduler.check_integrity()
    assert loop.scheduler.pages.num_used == 0
    return loop.tokens()


def make_requests(count=16, seed=0):
    rng = random.Random(seed)
    common = rng.choices(range(90), k=40)
    return [
        make_request(
            f"r{i}",
            common[: rng.choice([0, 0, 11, 40])] + rng.choices(range(90), k=rng.randint(1, 40)),
            seed=i,
            max_tokens=rng.choice([1, 9, 40]),
        )
        for i in range(count)
    ]


def expected(requests, windows=WINDOWS):
    return {request.request_id: expected_tokens(request, windows) for request in requests}


both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


class TestSameTokens:
    @both_loops
    @pytest.mark.parametrize("caching", [False, True], ids=["cold", "cached"])
    @pytest.mark.parametrize("budget", [8, 16, 128])
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_in_chunks_and_in_company(self, overlap, caching, budget, page_size):
        requests = make_requests()
        loop = make_loop(overlap, caching=caching, budget=budget, page_size=page_size)
        assert run(loop, requests) == expected(requests)

    @both_loops
    @pytest.mark.parametrize("num_window_pages", [40, 256])
    def test_when_preempted_for_whole_sequences(self, overlap, num_window_pages):
        requests = make_requests()
        loop = make_loop(overlap, num_pages=40, num_window_pages=num_window_pages)
        assert run(loop, requests) == expected(requests)
        assert loop.scheduler.num_preemptions > 0

    @both_loops
    @pytest.mark.parametrize("caching", [False, True], ids=["cold", "cached"])
    def test_when_preempted_for_the_pages_of_a_window(self, overlap, caching):
        requests = [make_request(f"r{i}", [i, 1, 2], seed=i, max_tokens=40) for i in range(8)]
        loop = make_loop(overlap, caching=caching, num_window_pages=20)
        assert run(loop, requests) == expected(requests)
        assert loop.scheduler.num_preemptions > 0

    @both_loops
    def test_from_a_cached_prefix(self, overlap):
        loop = make_loop(overlap)
        cold, warm, longer = (
            make_request(name, list(range(50 + n)), max_tokens=20)
            for name, n in (("cold", 0), ("warm", 0), ("longer", 30))
        )
        for request in (cold, warm, longer):
            assert run(loop, [request])[request.request_id] == expected_tokens(request, WINDOWS)
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
        assert longer.num_cached_tokens == 48


class TestPrefixHits:
    @pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 100])
    def test_hit_is_the_longest_whose_window_is_known(self, window):
        """Against the definition, for every set of known pages."""
        page_size, count = 2, 5
        hashes = []
        for i in range(count):
            hashes.append(page_hash(hashes[-1] if hashes else b"", [i, i]))
        for known in itertools.product([False, True], repeat=count):
            pool = WindowPool(count, page_size, window=window, max_num_batched_tokens=4)
            for page_id, digest, is_known in zip(pool.allocate(count), hashes, known, strict=True):
                if is_known:
                    pool.cache(page_id, digest)
            fits = [
                n
                for n in range(count + 1)
                # The token after n pages stands at n * page_size.
                if all(known[s // 2] for s in range(max(0, 2 * n - window + 1), 2 * n))
            ]
            assert pool.num_reusable(hashes) == max(fits)

    def test_hit_ends_where_the_window_before_it_was_forgotten(self):
        loop = make_loop(windows=(5,), num_window_pages=16, budget=16)
        run(loop, [make_request("first", list(range(41)), max_tokens=1)])
        # Others take the window's pages, and the full group remembers in vain.
        run(loop, [make_request("other", list(range(50, 95)), max_tokens=30)])
        again = make_request("again", list(range(41)), max_tokens=5)
        assert run(loop, [again])["again"] == expected_tokens(again, (5,))
        assert again.num_cached_tokens == 0


class TestRoom:
    @pytest.mark.parametrize("page_size", [1, 3, 4])
    @pytest.mark.parametrize(("window", "chunk"), [(1, 1), (5, 1), (4, 9), (8, 8)])
    def test_most_pages_is_what_the_worst_alignment_takes(self, window, chunk, page_size):
        spans = [
            (start + chunk - 1) // page_size - (start - window + 1) // page_size + 1
            for start in range(100, 100 + 3 * page_size)
        ]
        assert most_window_pages(window, chunk, page_size) == max(spans)

    def test_long_request_fits_few_window_pages(self):
        most = most_window_pages(5, 16, 4)
        request = make_request("long", [1] * 500, max_tokens=100)
        loop = make_loop(windows=(5,), num_window_pages=most)
        assert run(loop, [request]) == expected([request], (5,))
        assert loop.scheduler.num_preemptions == 0

    def test_request_that_no_window_pool_can_hold_is_refused(self):
        scheduler = make_scheduler(windows=(5,), num_window_pages=3)
        scheduler.add(make_request("fits", [1] * 10, max_tokens=2))
        with pytest.raises(InvalidRequestError, match="need 13 tokens.* room for 12"):
            scheduler.add(make_request("never", [1] * 10, max_tokens=3))


def peak_bytes(layers, num_tokens, chunk=512, page_size=16):
    """Return the most KV bytes a request of `num_tokens` ever holds, by the scheduler's books.

    Args:
        layers: Per layer its window, None for full attention; a token takes 1 byte in each.
        num_tokens: Of the prompt; a few are generated.
        chunk: Most tokens a step.
        page_size: Tokens per page.
    """
    windows = sorted({window for window in layers if window})
    scheduler = make_scheduler(
        3000, 3000, page_size, windows, caching=False, budget=chunk, max_num_seqs=1
    )
    weights = [layers.count(None), *(layers.count(window) for window in windows)]
    scheduler.add(make_request("long", [1] * num_tokens, max_tokens=40))
    peak = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        used = [pool.num_used for pool in scheduler.pages.pools]
        peak = max(peak, sum(w * n * page_size for w, n in zip(weights, used, strict=True)))
        count = len(plan.sampling_rows)
        scheduler.update(
            plan,
            StepResult(
                token_ids=((5,),) * count, corrupted=(False,) * count, logprobs=(None,) * count
            ),
        )
    return peak


def test_gemma_3_at_32k_holds_less_than_30_percent_of_full_attention():
    """Gemma 3 270M: 18 layers, every sixth of full attention, the others see 512 tokens."""
    gemma3 = [None if (layer + 1) % 6 == 0 else 512 for layer in range(18)]
    share = peak_bytes(gemma3, 32_000) / peak_bytes([None] * 18, 32_000)
    assert share <= 0.30  # 0.1935 in chunks of 512: 1/6 for the full layers, the rest for windows
