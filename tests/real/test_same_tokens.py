"""Tokens do not depend on company, on memory, on the loop or on the size of chunks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.engines import Work, run_alone, run_tokens
from tests.real.margins import first_difference, margin
from tests.real.model import RealModel
from tests.real.workload import OUTPUT_LENS, PROMPT_LENS, mixed_work

# On two cores that others use too; nothing here waits.
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

OVERLAP = {"plain": False, "overlapped": True}
CACHING = {"uncached": False, "cached": True}
CHUNKS = {"chunks of 32": 32, "chunks of 512": 512}

type Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def short(real: RealModel) -> tuple[dict[str, Work], Tokens]:
    """Return 64 requests, most of them short, and the tokens that each gets alone."""
    work = mixed_work(real.tokenizer, skew=4)
    assert {len(w.prompt) for w in work.values()} >= set(PROMPT_LENS)
    assert {w.params.max_tokens for w in work.values()} >= set(OUTPUT_LENS)
    assert sum(w.params.greedy for w in work.values()) == 32
    return work, tokens_alone(real, work)


@pytest.fixture(scope="module")
def growing(real: RealModel) -> tuple[dict[str, Work], Tokens]:
    """Return 12 requests that outgrow the pages they start with, and their tokens alone."""
    work = mixed_work(real.tokenizer, count=12, prompt_lens=(8, 100), output_lens=(14, 36))
    return work, tokens_alone(real, work)


@pytest.fixture(scope="module")
def long(real: RealModel) -> tuple[dict[str, Work], Tokens]:
    """Return 64 requests, many of them long, and the tokens that each gets alone."""
    work = mixed_work(real.tokenizer, seed=1)
    return work, tokens_alone(real, work)


def tokens_alone(real: RealModel, work: Mapping[str, Work]) -> Tokens:
    """Return what each request gets when nobody else is there and nothing is remembered."""
    with real.engine(overlap=False, enable_prefix_caching=False) as engine:
        tokens = run_alone(engine, work)
        assert engine.stats.num_preemptions == 0
    return tokens


def check(real: RealModel, work: Mapping[str, Work], alone: Tokens, **settings) -> int:
    """Assert that all at once get what each gets alone; return the number of preemptions."""
    with real.engine(**settings) as engine:
        tokens = run_tokens(engine, work)
        stats = engine.stats
        assert sum(stats.finished.values()) == len(work)
        assert stats.compilations_after_warmup == 0
        assert stats.num_pages_used == 0  # each is free or cached; `run` checked that none is lost
        assert bool(stats.num_pages_cached) == engine.config.enable_prefix_caching
        assert bool(stats.prefix_cache_hits) == engine.config.enable_prefix_caching
    different = [name for name in work if tokens[name] != alone[name]]
    assert not different, [_explain(real, n, work[n], alone[n], tokens[n]) for n in different]
    return stats.num_preemptions


def _explain(real: RealModel, name: str, work: Work, alone: list[int], got: list[int]) -> str:
    index = first_difference(alone, got)
    if index in (len(alone), len(got)):
        return f"{name}: {len(alone)} tokens alone, {len(got)} here"
    return f"{name}, token {index}: {alone[index]} alone, {got[index]} here; " + margin(
        real, work, alone, index
    )


def test_64_requests_at_once_get_the_tokens_they_get_alone(real, short) -> None:
    assert check(real, *short) == 0


@pytest.mark.parametrize(
    ("caching", "overlap", "chunk"),
    # Every pair of choices is among these four; all eight are below.
    [
        ("cached", "overlapped", "chunks of 512"),
        ("cached", "plain", "chunks of 32"),
        ("uncached", "overlapped", "chunks of 32"),
        ("uncached", "plain", "chunks of 512"),
    ],
)
def test_preempted_requests_resume_with_the_same_tokens(
    real, growing, caching, overlap, chunk
) -> None:
    settings = {
        "enable_prefix_caching": CACHING[caching],
        "overlap": OVERLAP[overlap],
        "max_num_batched_tokens": CHUNKS[chunk],
    }
    # The longest of them needs 8.
    assert check(real, *growing, num_pages=14, **settings) > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [54, 512], ids=["preempted", "ample"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("caching", CACHING)
def test_64_longer_requests_under_all_settings(
    real, long, caching, overlap, chunk, num_pages
) -> None:
    settings = {
        "enable_prefix_caching": CACHING[caching],
        "overlap": OVERLAP[overlap],
        "max_num_batched_tokens": CHUNKS[chunk],
    }
    num_preemptions = check(real, *long, num_pages=num_pages, **settings)
    assert (num_preemptions > 0) == (num_pages == 54)
