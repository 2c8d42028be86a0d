"""What a request holds in every group of pages, taken and given up all together.

Layers fall into groups by how far they look back. The full group holds the whole of every sequence:
the layers without a window, and the token ids. Each distinct window has a group with pages of its
own, which are given up once no token still to be computed can see them:

    full      page_ids  [0 ........................ num_pages_for(tokens))
    window    page_ids        [first .............. num_pages_for(tokens))

Both are page tables: entry i is about tokens [i * page_size, (i + 1) * page_size). A model without
windows has the full group only, and what is written here of windows costs it nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.page_pool import PagePool
from jaxinfer.request import Request, WindowPages


def most_window_pages(window: int, chunk: int, page_size: int) -> int:
    """Return how many pages a sequence holds at most for layers that see `window` keys.

    A step of `chunk` tokens reads them and the `window - 1` before the first; the worst alignment
    starts on the last token of a page.
    """
    return (window + chunk - 1 + page_size - 2) // page_size + 1


class WindowPool(PagePool):
    """The pages of the layers that see `window` keys, a token's own included.

    Attributes:
        window: Keys that a token sees.
        most_pages: What one sequence holds at most.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        *,
        window: int,
        max_num_batched_tokens: int,
    ):
        super().__init__(num_pages, page_size, enable_prefix_caching)
        self.window = window
        self.most_pages = most_window_pages(window, max_num_batched_tokens, page_size)

    def first_page(self, position: int) -> int:
        """Return the first page that the token at `position`, or any later one, can see."""
        return max(position - self.window + 1, 0) // self.page_size

    def num_reusable(self, hashes: Sequence[bytes]) -> int:
        """Return the largest n so that all pages in the window of the token after n are known."""
        n = len(hashes)
        while n:
            window = range(n - 1, self.first_page(n * self.page_size) - 1, -1)
            missing = next((i for i in window if hashes[i] not in self._page_of), None)
            if missing is None:
                return n
            # Every n down to there sees the missing page.
            n = missing
        return 0


class PageGroups:
    """The pools of a model, and who holds what in them.

    Attributes:
        full: Whole sequences; `Request.page_ids` are its pages.
        windows: In the order of `Request.window_pages`.
    """

    def __init__(self, full: PagePool, windows: Sequence[WindowPool] = ()):
        assert all(pool.page_size == full.page_size for pool in windows), "page sizes differ"
        self.full = full
        self.windows = tuple(windows)
        self.pools: tuple[PagePool, ...] = (full, *windows)

    @property
    def num_pages(self) -> int:
        """Pages of all groups, as are those that are used and cached."""
        return sum(pool.num_pages for pool in self.pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self.pools)

    @property
    def usage(self) -> float:
        """The used share of the group that will run out first, 0 to 1."""
        return max(pool.usage for pool in self.pools)

    def most_tokens(self) -> float:
        """Return the length of the longest sequence that fits when it is alone."""
        return min(
            float("inf")
            if isinstance(pool, WindowPool) and pool.most_pages <= pool.num_pages
            else pool.num_pages * pool.page_size
            for pool in self.pools
        )

    def admit(self, request: Request, hashes: Sequence[bytes], spare: int) -> bool:
        """Give a request pages for all its tokens, those found and new ones; or nothing.

        A window's group gives what the longest chunk needs: its pages move along with the tokens.

        Args:
            request: It holds nothing yet; told its pages and how many tokens were found.
            hashes: Of the leading pages that may be shared.
            spare: Pages that must be left in each group.
        """
        hits = self._match_prefix(hashes)
        num_hits = len(hits[0])
        num_pages = self.full.num_pages_for(request.num_tokens)
        firsts, missing = [0], [num_pages - num_hits]
        for pool in self.windows:
            firsts.append(pool.first_page(num_hits * pool.page_size))
            missing.append(min(num_pages, firsts[-1] + pool.most_pages) - num_hits)
        if not self._can_allocate([n + spare for n in missing]):
            for pool, page_ids in zip(self.pools, hits, strict=True):
                pool.free(page_ids)
            return False
        request.page_ids, *rest = (
            page_ids + pool.allocate(n)
            for pool, page_ids, n in zip(self.pools, hits, missing, strict=True)
        )
        request.window_pages = [
            WindowPages([0] * first + page_ids, first)
            for first, page_ids in zip(firsts[1:], rest, strict=True)
        ]
        request.num_hashed_pages = num_hits
        request.num_computed_tokens = num_hits * self.full.page_size
        return True

    def grow(self, request: Request, end: int) -> bool:
        """Get a request pages up to token `end`, in all groups or in none; False if it must wait.

        First gives up what no token from `num_computed_tokens` on can see.
        """
        return self.grow_all([(request, end)])

    def grow_all(self, ends: Sequence[tuple[Request, int]]) -> bool:
        """Get each request pages up to its token `end`, or none of them any: as `grow`."""
        total = [0] * len(self.pools)
        wanted: list[tuple[list[int], PagePool, int]] = []
        for request, end in ends:
            self._give_up_unseen(request)
            num_pages = self.full.num_pages_for(end)
            tables = [request.page_ids, *(held.page_ids for held in request.window_pages)]
            for i, (pool, page_ids) in enumerate(zip(self.pools, tables, strict=True)):
                if num_pages > len(page_ids):
                    total[i] += num_pages - len(page_ids)
                    wanted.append((page_ids, pool, num_pages - len(page_ids)))
        if not self._can_allocate(total):
            return False
        for page_ids, pool, n in wanted:
            page_ids += pool.allocate(n)
        return True

    def _give_up_unseen(self, request: Request) -> None:
        """Free the pages that no token from `num_computed_tokens` on can see.

        Steps in flight may still read them: whoever is given the pages next writes in a later step.
        """
        for pool, held in zip(self.windows, request.window_pages, strict=True):
            first = pool.first_page(request.num_computed_tokens)
            if first > held.first:
                pool.free(held.page_ids[held.first : first])
                held.first = first

    def share(self, request: Request, hashes: Sequence[bytes]) -> None:
        """Let others find a request's leading pages, whose hashes are these."""
        known, num_pages = request.num_hashed_pages, len(hashes)
        for index in range(known, num_pages):
            self.full.cache(request.page_ids[index], hashes[index])
        for pool, held in zip(self.windows, request.window_pages, strict=True):
            for index in range(max(known, held.first), num_pages):
                pool.cache(held.page_ids[index], hashes[index])
        request.num_hashed_pages = num_pages

    def release(self, request: Request) -> None:
        """Free all that a request holds; one that waits holds nothing, in no group."""
        self.full.free(request.page_ids)
        for pool, held in zip(self.windows, request.window_pages, strict=False):
            pool.free(held.page_ids[held.first :])
        request.page_ids, request.window_pages = [], []

    def uncache(self, hashes: Sequence[bytes]) -> None:
        """Forget these prefixes in all groups."""
        for pool in self.pools:
            pool.uncache(hashes)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Assert that pools and requests agree; `AssertionError` says where not."""
        for request in running:
            tables = [request.page_ids, *(held.page_ids for held in request.window_pages)]
            assert len(tables) == len(self.pools), f"groups without a page table: {request}"
            for page_ids in tables:
                num_slots = len(page_ids) * self.full.page_size
                assert request.num_computed_tokens <= num_slots, f"tokens without a page: {request}"
            for pool, held in zip(self.windows, request.window_pages, strict=True):
                first = pool.first_page(request.num_computed_tokens)
                assert held.first <= first, f"pages given up too early: {request}"
                assert len(held.page_ids) - held.first <= pool.most_pages, f"too many: {request}"
        self.full.check_integrity(request.page_ids for request in running)
        for i, pool in enumerate(self.windows):
            pages = (request.window_pages[i] for request in running)
            pool.check_integrity(held.page_ids[held.first :] for held in pages)

    def _can_allocate(self, num_pages: Sequence[int]) -> bool:
        return all(pool.can_allocate(n) for pool, n in zip(self.pools, num_pages, strict=True))

    def _match_prefix(self, hashes: Sequence[bytes]) -> list[list[int]]:
        """Take the pages of the longest prefix after which every group can go on, by group.

        Full layers see all of it; those with a window see its last pages only.
        """
        if not self.windows:
            return [self.full.match_prefix(hashes)]
        n, previous = self.full.num_known(hashes), -1
        # Each group lowers n to the next length that suits it, until one suits all.
        while n != previous:
            previous = n
            for pool in self.windows:
                n = pool.num_reusable(hashes[:n])
        hits = [self.full.match_prefix(hashes[:n])]
        for pool in self.windows:
            hits.append(pool.match_prefix(hashes[pool.first_page(n * pool.page_size) : n]))
        return hits
