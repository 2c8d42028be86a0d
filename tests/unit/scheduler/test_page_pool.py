"""Pages are never lost, and found again only by those who may."""

import pytest

from jaxinfer.page_pool import PagePool, page_hash


def chain(*pages, salt=""):
    hashes, previous = [], b""
    for page in pages:
        previous = page_hash(previous, page, salt)
        hashes.append(previous)
    return hashes


def cached_chain(pool, hashes):
    """Allocate, hash and free one page per hash, as a request does that comes and goes."""
    page_ids = pool.allocate(len(hashes))
    for page_id, digest in zip(page_ids, hashes, strict=True):
        pool.cache(page_id, digest)
    pool.free(page_ids)
    return page_ids


ABC = chain([1, 2], [3, 4], [5, 6])


def test_allocated_pages_are_distinct_and_come_back():
    pool = PagePool(4, 2)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert not pool.can_allocate(1)
    assert pool.usage == 1.0
    pool.check_integrity([first, second])
    pool.free(first)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 1, 0)
    pool.check_integrity([second])


def test_allocating_more_than_there_is_breaks_loudly():
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        PagePool(4, 2).allocate(5)


def test_freed_prefix_is_found_again_page_for_page():
    pool = PagePool(8, 2)
    page_ids = cached_chain(pool, ABC)
    assert pool.num_cached == 3
    assert pool.match_prefix(ABC) == page_ids
    assert pool.num_cached == 0
    pool.check_integrity([page_ids])


def test_match_stops_at_the_first_unknown_page():
    pool = PagePool(8, 2)
    page_ids = cached_chain(pool, ABC)
    assert pool.match_prefix(chain([1, 2], [3, 4], [5, 7])) == page_ids[:2]
    assert pool.match_prefix(chain([9, 9], [3, 4])) == []


def test_shared_page_is_free_only_after_its_last_holder():
    pool = PagePool(3, 2, enable_prefix_caching=True)
    mine = pool.allocate(1)
    pool.cache(mine[0], ABC[0])
    theirs = pool.match_prefix(ABC)
    assert theirs == mine
    pool.free(mine)
    assert pool.num_used == 1
    pool.check_integrity([theirs])
    pool.free(theirs)
    assert pool.num_used == 0


def test_hits_that_are_idle_count_as_allocatable_only_until_taken():
    pool = PagePool(3, 2)
    cached_chain(pool, ABC)
    assert pool.can_allocate(3)
    hits = pool.match_prefix(ABC[:2])
    assert pool.can_allocate(1)
    assert not pool.can_allocate(2)
    pool.free(hits)
    assert pool.can_allocate(3)


def test_tail_of_a_chain_is_forgotten_before_its_head():
    pool = PagePool(3, 2)
    cached_chain(pool, ABC)
    pool.allocate(1)
    assert len(pool.match_prefix(ABC)) == 2


def test_least_recently_used_chain_is_forgotten_first():
    pool = PagePool(4, 2)
    old, new = chain([1, 1], [1, 1]), chain([2, 2], [2, 2])
    cached_chain(pool, old)
    cached_chain(pool, new)
    pool.free(pool.match_prefix(old))
    pool.allocate(2)
    assert pool.match_prefix(new) == []
    assert len(pool.match_prefix(old)) == 2


def test_free_pages_are_used_up_before_anything_is_forgotten():
    pool = PagePool(5, 2)
    cached_chain(pool, ABC)
    pool.allocate(2)
    assert len(pool.match_prefix(ABC)) == 3


def test_a_reused_page_is_no_longer_found():
    pool = PagePool(1, 2)
    cached_chain(pool, ABC[:1])
    page_ids = pool.allocate(1)
    assert pool.match_prefix(ABC) == []
    pool.check_integrity([page_ids])


def test_duplicate_of_a_known_page_is_freed_for_good():
    pool = PagePool(4, 2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.cache(first[0], ABC[0])
    pool.cache(second[0], ABC[0])
    pool.free(first)
    pool.free(second)
    assert pool.num_cached == 1
    assert pool.match_prefix(ABC) == first
    pool.check_integrity([first])


@pytest.mark.parametrize("idle", [False, True])
def test_uncached_prefix_is_found_by_nobody(idle):
    pool = PagePool(4, 2)
    page_ids = pool.allocate(2)
    for page_id, digest in zip(page_ids, ABC, strict=False):
        pool.cache(page_id, digest)
    if idle:
        pool.free(page_ids)
    pool.uncache(ABC)
    assert pool.match_prefix(ABC) == []
    pool.check_integrity([] if idle else [page_ids])


def test_without_prefix_caching_nothing_is_remembered():
    pool = PagePool(4, 2, enable_prefix_caching=False)
    cached_chain(pool, ABC)
    assert pool.num_cached == 0
    assert pool.match_prefix(ABC) == []


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_pages_for_rounds_up(num_tokens, num_pages):
    assert PagePool(4, 16).num_pages_for(num_tokens) == num_pages


class TestPageHash:
    def test_depends_on_tokens_their_order_the_prefix_and_the_salt(self):
        hashes = [
            *chain([1, 2], [1, 2]),
            *chain([2, 1], [1, 2]),
            *chain([1, 2], [1, 2], salt="a"),
            *chain([1, 2], [1, 2], salt="b"),
        ]
        assert len(set(hashes)) == len(hashes)

    def test_same_chain_same_hashes(self):
        assert chain([1, 2], [3, 4], salt="x") == chain((1, 2), (3, 4), salt="x")

    def test_neighbouring_ids_cannot_be_read_in_two_ways(self):
        assert page_hash(b"", [1, 23]) != page_hash(b"", [12, 3])
        assert page_hash(b"", [256, 0]) != page_hash(b"", [0, 1])

    def test_salt_may_hold_anything_that_json_can(self):
        salts = ["", "\x00", "\ud800", "\udc00", "\ud800\udc00", "\U00010000", "é", "e\u0301"]
        assert len({page_hash(b"", [1], salt) for salt in salts}) == len(salts)

    def test_salt_cannot_spell_another_page(self):
        inner = page_hash(b"", [1])
        forged = (inner + (2).to_bytes(8, "little")).decode("latin-1")
        assert page_hash(b"", [3], forged) != page_hash(page_hash(inner, [2]), [3])


class TestCheckIntegrity:
    """Each defect is planted in the private state, for no public call makes it."""

    @pytest.fixture
    def pool(self):
        pool = PagePool(6, 2)
        cached_chain(pool, ABC)
        return pool

    def test_names_a_leaked_page(self, pool):
        page_ids = pool.allocate(1)
        with pytest.raises(AssertionError, match=rf"{page_ids[0]}: '1 counted, 0 real'"):
            pool.check_integrity([])

    def test_names_a_page_held_without_a_reference(self, pool):
        page_ids = pool.allocate(1)
        with pytest.raises(AssertionError, match="1 counted, 2 real"):
            pool.check_integrity([page_ids, page_ids])

    def test_names_a_lost_page(self, pool):
        lost = pool._free.pop()
        with pytest.raises(AssertionError, match=rf"neither free, idle nor used: \[{lost}\]"):
            pool.check_integrity([])

    def test_names_a_page_that_is_free_twice(self, pool):
        pool._free.append(pool._free[0])
        with pytest.raises(AssertionError, match="several states"):
            pool.check_integrity([])

    def test_sees_maps_that_differ(self, pool):
        pool._page_of[b"stray"] = 0
        with pytest.raises(AssertionError, match="differ"):
            pool.check_integrity([])

    def test_sees_an_idle_page_without_a_hash(self, pool):
        page_id = next(iter(pool._idle))
        del pool._page_of[pool._hash_of.pop(page_id)]
        with pytest.raises(AssertionError, match="without a hash"):
            pool.check_integrity([])

    def test_sees_a_free_page_with_a_hash(self, pool):
        page_id, _ = pool._idle.popitem()
        pool._free.append(page_id)
        with pytest.raises(AssertionError, match="free pages with a hash"):
            pool.check_integrity([])

    def test_freeing_a_page_twice_breaks_loudly(self, pool):
        page_ids = pool.allocate(1)
        pool.free(page_ids)
        with pytest.raises(AssertionError, match="non-holder"):
            pool.free(page_ids)
