"""The page tables of live requests, kept as arrays between steps. Host memory only; numpy only.

A request's pages are a Python list that grows by one in `page_size` steps. Turning 256 such lists
into an array costs more than all the rest of a step's metadata, so only what is new is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.request import Request


@dataclass(slots=True)
class _Entry:
    """Where a request's tables stand, and how much of its lists they hold.

    Attributes:
        index: Row of the arrays.
        page_ids: The full group's list: a request that starts over gets another one.
        counts: Pages copied, by group.
    """

    index: int
    page_ids: list[int]
    counts: list[int]


class PageTables:
    """Rows of page ids, one a request and group.

    Args:
        num_groups: Groups of pages that a request holds.
        max_pages: P, pages of the longest sequence.

    Attributes:
        arrays: int32 [num_groups, rows, P]. Entries past a request's last page may be anything.
    """

    def __init__(self, num_groups: int, max_pages: int):
        self.arrays = np.zeros((num_groups, 8, max_pages), np.int32)
        self._entries: dict[str, _Entry] = {}
        self._free = list(range(8))
        self._requests: list[Request] | None = None  # of the last call
        self._last: list[_Entry] = []
        self._indices = np.zeros(0, np.int64)

    def rows_of(self, requests: Sequence[Request]) -> np.ndarray:
        """Bring the requests' tables up to date; return where they stand, int64 [len(requests)]."""
        # In most steps the rows are those of the step before.
        if requests != self._requests:
            self._requests = list(requests)
            self._last = [self._entry(request) for request in requests]
            self._indices = np.array([entry.index for entry in self._last], np.int64)
        has_windows = self.arrays.shape[0] > 1
        for i, (request, entry) in enumerate(zip(requests, self._last, strict=True)):
            if entry.page_ids is not request.page_ids:
                self._last[i] = entry = self._entry(request)
                self._indices[i] = entry.index
            if has_windows or len(entry.page_ids) != entry.counts[0]:
                self._extend(entry, request)
        return self._indices

    def forget(self, request_id: str) -> None:
        """Let others have the rows of a finished request; unknown ids are fine."""
        if self._drop(request_id):
            self._requests, self._last = None, []

    def _drop(self, request_id: str) -> bool:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._free.append(entry.index)
        return entry is not None

    def _entry(self, request: Request) -> _Entry:
        entry = self._entries.get(request.request_id)
        # Ids may be used again, and pages change hands: the list itself tells.
        if entry is not None and entry.page_ids is request.page_ids:
            return entry
        self._drop(request.request_id)
        num_groups, num_rows, _ = self.arrays.shape
        if not self._free:
            self.arrays = np.concatenate([self.arrays, np.zeros_like(self.arrays)], axis=1)
            self._free = list(range(num_rows, 2 * num_rows))
        entry = _Entry(self._free.pop(), request.page_ids, [0] * num_groups)
        self._entries[request.request_id] = entry
        return entry

    def _extend(self, entry: _Entry, request: Request) -> None:
        tables: Sequence[list[int]] = [
            request.page_ids,
            *(w.page_ids for w in request.window_pages),
        ]
        for group, page_ids in enumerate(tables):
            known, count = entry.counts[group], len(page_ids)
            if known != count:
                self.arrays[group, entry.index, known:count] = page_ids[known:]
                entry.counts[group] = count
