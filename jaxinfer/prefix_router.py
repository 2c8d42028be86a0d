"""Which replica answers a request: the one that knows most of its prompt, within limits of load.

Knows hashes and counts only, neither engines nor tokens, so that the same rule places requests on
engines in this process and on actors of a cluster. It remembers what it sent where, instead of
asking the caches: so requests of a burst find each other before any of them is computed, and asking
costs no message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

SLACK = 4
SPREAD = 1.5
MIN_SHARE = 0.25


class PrefixRouter[Replica: Hashable]:
    """Remembers which prefixes each replica was given. Not thread-safe.

    The rule, in order:

    1. Only replicas whose load is at most `SPREAD` times the least load plus `SLACK` are asked: a
       popular prefix must not leave the others idle.
    2. Of these the one that knows the longest prefix, if that is `MIN_SHARE` of the prompt: a few
       words that all prompts share are no reason.
    3. Else, and among equals, the one with the least load, then the one that remembers least.

    Args:
        capacity: Pieces of prefixes that are remembered of each replica: what its cache holds.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._known: dict[Replica, OrderedDict[bytes, None]] = {}

    def place(self, hashes: Sequence[bytes], loads: Mapping[Replica, float]) -> Replica:
        """Return the replica for a prompt, and remember the choice.

        Args:
            hashes: Chained: each stands for a piece of the prompt and for all before it.
            loads: Requests under way, by replica. Those that are missing are forgotten.
        """
        assert loads, "somebody has to answer"
        for replica in self._known.keys() - loads.keys():
            del self._known[replica]
        for replica in loads:
            self._known.setdefault(replica, OrderedDict())
        most = SPREAD * min(loads.values()) + SLACK
        enough = max(1.0, MIN_SHARE * len(hashes))

        def rank(replica: Replica) -> tuple[int, float, int]:
            known = self.num_known(replica, hashes)
            return (
                -known if known >= enough else 0,
                loads[replica],
                len(self._known[replica]),
            )

        chosen = min((replica for replica in loads if loads[replica] <= most), key=rank)
        self._remember(self._known[chosen], hashes)
        return chosen

    def num_known(self, replica: Replica, hashes: Sequence[bytes]) -> int:
        """Return how many leading pieces a replica was given before and has not forgotten."""
        known = self._known.get(replica, ())
        return next((i for i, h in enumerate(hashes) if h not in known), len(hashes))

    def _remember(self, known: OrderedDict[bytes, None], hashes: Sequence[bytes]) -> None:
        # Backwards, as a page pool does: a prefix without its tail is still of use.
        for digest in reversed(hashes):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._capacity:
            known.popitem(last=False)
