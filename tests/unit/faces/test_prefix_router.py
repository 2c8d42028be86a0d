"""Where requests go: to what they share with earlier ones, as long as nobody has too much to do."""

from __future__ import annotations

from jaxinfer.prefix_router import SLACK, SPREAD, PrefixRouter

IDLE = {"a": 0.0, "b": 0.0}


def chain(name: str, num_pieces: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(num_pieces)]


def test_a_prompt_follows_its_prefix():
    router: PrefixRouter[str] = PrefixRouter(100)
    homes = {name: router.place(chain(name, 4), IDLE) for name in "xyz"}
    for name, home in homes.items():
        longer = chain(name, 4) + chain("tail", 4)
        assert router.place(longer, IDLE) == home


def test_new_prefixes_spread_over_idle_replicas():
    router: PrefixRouter[str] = PrefixRouter(100)
    homes = [router.place(chain(str(i), 4), IDLE) for i in range(10)]
    assert homes.count("a") == homes.count("b") == 5


def test_the_longest_of_several_known_prefixes_wins():
    router: PrefixRouter[str] = PrefixRouter(100)
    router.place(chain("x", 2), {"a": 0})
    router.place(chain("x", 3), {"a": 9, "b": 0})
    router.place(chain("x", 2), {"a": 0, "b": 9})  # a forgets nothing
    assert router.place(chain("x", 8), IDLE) == "b"


def test_a_popular_prefix_does_not_leave_others_idle():
    router: PrefixRouter[str] = PrefixRouter(100)
    loads = {"a": 0.0, "b": 0.0}
    for _ in range(100):
        loads[router.place(chain("x", 4), loads)] += 1
        assert max(loads.values()) <= SPREAD * min(loads.values()) + SLACK + 1
    assert min(loads.values()) >= 30


def test_a_short_common_beginning_is_no_reason():
    router: PrefixRouter[str] = PrefixRouter(100)
    template = chain("template", 1)
    first = router.place(template + chain("x", 9), IDLE)
    loads = {**IDLE, first: 1.0}
    assert router.place(template + chain("y", 9), loads) != first


def test_only_what_a_cache_could_hold_is_remembered_and_heads_outlive_tails():
    router: PrefixRouter[str] = PrefixRouter(6)
    router.place(chain("x", 4), {"a": 0})
    router.place(chain("y", 4), {"a": 0})
    assert router.num_known("a", chain("x", 4)) == 2
    assert router.num_known("a", chain("y", 4)) == 4


def test_a_replica_that_comes_back_is_a_new_one():
    router: PrefixRouter[str] = PrefixRouter(100)
    router.place(chain("x", 4), {"a": 0})
    router.place(chain("y", 4), {"b": 0})
    assert router.num_known("a", chain("x", 4)) == 0
