"""KV pages as numbers: which are free, who holds the others, and which prefix each one remembers.

Host bookkeeping only: the memory behind a page id is `jaxinfer.kv_cache`'s, the requests that hold
pages are `jaxinfer.scheduler`'s. A page is always in exactly one of three states:

    free     nobody holds it and its content means nothing
    idle     nobody holds it, but its hash is known: a request with that prefix may take it back
    used     held by one or more requests; shared pages are full and never written again
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


def page_hash(previous: bytes, token_ids: Sequence[int], salt: str = "") -> bytes:
    """Return the identity of a full page: of its tokens and of everything before them.

    Keys and values depend on the whole prefix, so the hash is a chain. Whoever finds a collision
    reads another's pages, hence a cryptographic hash over an unambiguous encoding.

    Args:
        previous: Hash of the page before, b"" for the first one.
        token_ids: The page's tokens.
        salt: Who may share; it enters at the root only, and so reaches every page of the chain.
    """
    # A salt from JSON may hold lone surrogates, which plain UTF-8 refuses. `person` keeps a salt
    # that spells out some page's bytes from landing on that page's hash.
    if not previous:
        salt_bytes = salt.encode("utf-8", "surrogatepass")
        previous = blake2b(salt_bytes, digest_size=32, person=b"salt").digest()
    page_bytes = previous + array("q", token_ids).tobytes()
    return blake2b(page_bytes, digest_size=32, person=b"page").digest()


def extend_hashes(
    hashes: list[bytes], num_pages: int, token_ids: Sequence[int], page_size: int, salt: str
) -> None:
    """Append to a chain until it covers the first `num_pages` pages of `token_ids`."""
    for start in range(len(hashes) * page_size, num_pages * page_size, page_size):
        page = token_ids[start : start + page_size]
        hashes.append(page_hash(hashes[-1] if hashes else b"", page, salt))


class PagePool:
    """Owner of the page ids [0, num_pages). Ask `can_allocate`, then act.

    Attributes:
        num_pages: How many pages there are.
        page_size: Tokens per page.
        enable_prefix_caching: If False nothing is remembered: freed pages are free at once.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True):
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = list(reversed(range(num_pages)))
        self._idle: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self._num_holders = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: the free ones and, by forgetting, the idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Idle pages: nobody holds them, and a prefix hit would take them back."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def usage(self) -> float:
        """The used share of the pages, 0 to 1."""
        return self.num_used / self.num_pages

    def num_pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold that many tokens."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, num_pages: int) -> bool:
        """Return whether `allocate(num_pages)` would succeed.

        To ask about a request with prefix hits, take them first (`match_prefix`): an idle page
        counts as allocatable until it has a holder.
        """
        return num_pages <= self.num_free

    def allocate(self, num_pages: int) -> list[int]:
        """Take `num_pages` pages of meaningless content; the caller is their only holder."""
        assert self.can_allocate(num_pages), f"{num_pages} pages wanted, {self.num_free} free"
        page_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_pages)]
        for page_id in page_ids:
            self._num_holders[page_id] = 1
        return page_ids

    def free(self, page_ids: Sequence[int]) -> None:
        """Give up one hold on each page of a chain, given in the chain's order.

        Walks it backwards, so that its tail is forgotten first: a prefix without its tail is still
        of use, a tail without its prefix can never be hit.
        """
        for page_id in reversed(page_ids):
            assert self._num_holders[page_id] > 0, f"page {page_id} freed by a non-holder"
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id] == 0:
                if page_id in self._hash_of:
                    self._idle[page_id] = None
                else:
                    self._free.append(page_id)

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Return the length of the longest known prefix of the chain `hashes`."""
        return next((i for i, h in enumerate(hashes) if h not in self._page_of), len(hashes))

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Take the pages of the longest known prefix of the chain `hashes`; free them after use."""
        page_ids = []
        for digest in hashes:
            page_id = self._page_of.get(digest)
            if page_id is None:
                break
            self._idle.pop(page_id, None)
            self._num_holders[page_id] += 1
            page_ids.append(page_id)
        return page_ids

    def cache(self, page_id: int, digest: bytes) -> None:
        """Let requests with the same prefix find a full page, from now until it is reused.

        The first page of a hash stays the known one; a duplicate is freed for good after use.
        """
        assert self._num_holders[page_id] > 0, f"page {page_id} cached without a holder"
        if self.enable_prefix_caching and digest not in self._page_of:
            assert page_id not in self._hash_of, f"page {page_id} already has another hash"
            self._page_of[digest] = page_id
            self._hash_of[page_id] = digest

    def uncache(self, hashes: Iterable[bytes]) -> None:
        """Forget these prefixes, whichever pages hold them: nobody else will find them."""
        for digest in hashes:
            page_id = self._page_of.pop(digest, None)
            if page_id is not None:
                del self._hash_of[page_id]
                if page_id in self._idle:
                    del self._idle[page_id]
                    self._free.append(page_id)

    def _evict(self) -> int:
        page_id, _ = self._idle.popitem(last=False)
        del self._page_of[self._hash_of.pop(page_id)]
        return page_id

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that nothing is lost, shared by mistake or remembered wrongly.

        Args:
            holders: The page ids of every live request.

        Raises:
            AssertionError: Names the pages concerned.
        """
        held = Counter(page_id for page_ids in holders for page_id in page_ids)
        wrong = {
            page_id: f"{count} counted, {held[page_id]} real"
            for page_id, count in enumerate(self._num_holders)
            if count != held[page_id]
        }
        assert not wrong, f"pages with the wrong number of holders: {wrong}"

        states = Counter([*self._free, *self._idle, *held])
        lost = sorted(set(range(self.num_pages)) - set(states))
        assert not lost, f"pages neither free, idle nor used: {lost}"
        several = sorted(page_id for page_id, count in states.items() if count > 1)
        assert not several, f"pages in several states at once: {several}"
        foreign = sorted(set(states) - set(range(self.num_pages)))
        assert not foreign, f"pages outside [0, {self.num_pages}): {foreign}"

        inverse = {digest: page_id for page_id, digest in self._hash_of.items()}
        assert inverse == self._page_of, "hash → page and page → hash differ"
        hashless = sorted(set(self._idle) - set(self._hash_of))
        assert not hashless, f"idle pages without a hash: {hashless}"
        remembered = sorted(set(self._free) & set(self._hash_of))
        assert not remembered, f"free pages with a hash: {remembered}"
