"""A step's metadata: `StepPlan` → one int32 array → padded device arrays.

Everything the backbone must know travels in one transfer and is cut apart on the device. Packing is
numpy only; unpacking happens inside jit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch import ScheduledRow, StepPlan
from jaxinfer.page_tables import PageTables
from pallas_kernels import RaggedBatch
from pallas_kernels.shapes import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardBatch:
    """What the backbone computes, padded to a bucket.

    Attributes:
        token_ids: int32 [T]; 0 where `pending_rows` says that the device knows better.
        pending_rows: int32 [T]; row of the previous step's sampled tokens, -1 for none.
        positions: int32 [T]; -1 for padding.
        slot_mapping: int32 [num_groups, T]; page * page_size + offset, outside the pool for
            padding. Groups are those of pages: the full one, then one for each window.
        sample_tokens: int32 [B]; index of the token whose hidden state is sampled from, by
            sampling row.
        ragged: Which tokens and pages belong to which row, by group: they differ in pages only.
    """

    token_ids: Array
    pending_rows: Array
    positions: Array
    slot_mapping: Array
    sample_tokens: Array
    ragged: tuple[RaggedBatch, ...]


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Where each field stands in the packed array of a bucket. Static under jit.

    Attributes:
        num_tokens: T, the bucket.
        max_num_seqs: B.
        max_pages: P, pages of the longest sequence.
        num_slots: Per group, tokens that fit its pages; the slot of padding tokens.
        page_size: Tokens per page.
    """

    num_tokens: int
    max_num_seqs: int
    max_pages: int
    num_slots: tuple[int, ...]
    page_size: int

    def _fields(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        T, B, P = self.num_tokens, self.max_num_seqs, self.max_pages
        num_groups = len(self.num_slots)
        return (
            ("token_ids", (T,)),
            ("pending_rows", (T,)),
            ("positions", (T,)),
            ("slot_mapping", (num_groups, T)),
            ("sample_tokens", (B,)),
            ("seq_lens", (B,)),
            ("query_start_loc", (B + 1,)),
            ("counts", (2,)),
            ("page_table", (num_groups, B, P)),
        )

    @cached_property
    def _spans(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        spans, start = {}, 0
        for name, shape in self._fields():
            end = start + math.prod(shape)
            spans[name] = slice(start, end), shape
            start = end
        return spans

    @cached_property
    def size(self) -> int:
        """Length of the packed array."""
        return sum(math.prod(shape) for _, shape in self._fields())

    def _views(self, packed):
        return {name: packed[span].reshape(shape) for name, (span, shape) in self._spans.items()}

    def pack(self, plan: StepPlan, tables: PageTables) -> np.ndarray:
        """Return int32 [size], a fresh array: the device may alias it while the step runs."""
        packed = np.zeros(self.size, np.int32)
        views = self._views(packed)
        views["pending_rows"][:] = -1
        views["positions"][:] = -1
        views["slot_mapping"][:] = np.asarray(self.num_slots)[:, None]
        rows, num_decode_rows = plan.rows, plan.num_decode_rows
        if rows:
            indices = tables.rows_of([row.request for row in rows])
            ends = np.array([row.start + row.num_scheduled_tokens for row in rows], np.int32)
            num_tokens = int(ends.max()) + plan.num_decode_steps - 1
            width = -(-num_tokens // self.page_size)
            views["page_table"][:, : len(rows), :width] = tables.arrays[:, indices, :width]
            views["seq_lens"][: len(rows)] = ends
            self._pack_decode_rows(views, rows[:num_decode_rows])
        token = num_decode_rows
        views["query_start_loc"][1 : token + 1] = np.arange(1, token + 1)
        for i, row in enumerate(rows[num_decode_rows:], start=num_decode_rows):
            token_ids = row.request.token_ids[row.start : row.end]  # all that are known
            views["token_ids"][token : token + len(token_ids)] = token_ids
            end = token + row.num_scheduled_tokens
            self._place(views, slice(token, end), np.arange(row.start, row.end), i)
            views["pending_rows"][end - 1] = row.pending_row
            views["query_start_loc"][i + 1] = token = end
        views["query_start_loc"][len(rows) + 1 :] = token
        last_tokens = views["query_start_loc"][1 : len(rows) + 1] - 1
        if plan.sampling_rows is not rows:
            last_tokens = last_tokens[[i for i, row in enumerate(rows) if row.samples]]
        views["sample_tokens"][: len(last_tokens)] = last_tokens
        views["counts"][:] = (num_decode_rows, len(rows))
        return packed

    def _pack_decode_rows(self, views: dict[str, np.ndarray], rows: Sequence[ScheduledRow]) -> None:
        """Fill in the rows of one token, token i of row i, a field at a time."""
        span = slice(0, len(rows))
        pending_rows = [row.pending_row for row in rows]
        views["pending_rows"][span] = pending_rows
        views["token_ids"][span] = [
            row.request.token_ids[row.start] if pending < 0 else 0
            for row, pending in zip(rows, pending_rows, strict=True)
        ]
        self._place(views, span, views["seq_lens"][span] - 1, np.arange(len(rows)))

    def _place(
        self,
        views: dict[str, np.ndarray],
        tokens: slice,
        positions: np.ndarray,
        rows: int | np.ndarray,
    ) -> None:
        """Fill in positions and slots of some tokens, which belong to these rows."""
        page_ids = views["page_table"][:, rows, positions // self.page_size]
        views["positions"][tokens] = positions
        views["slot_mapping"][:, tokens] = page_ids * self.page_size + positions % self.page_size

    def unpack(self, packed: Int[Array, " size"]) -> ForwardBatch:
        """Cut the packed array apart, inside jit."""
        views = self._views(packed)
        ragged = tuple(
            RaggedBatch(
                page_table=page_table,
                seq_lens=views["seq_lens"],
                query_start_loc=views["query_start_loc"],
                num_decode_rows=views["counts"][0],
                num_rows=views["counts"][1],
            )
            for page_table in views["page_table"]
        )
        return ForwardBatch(
            token_ids=views["token_ids"],
            pending_rows=views["pending_rows"],
            positions=views["positions"],
            slot_mapping=views["slot_mapping"],
            sample_tokens=views["sample_tokens"],
            ragged=ragged,
        )


def resolve_pending(batch: ForwardBatch, sampled: Int[Array, " B"]) -> Int[Array, " T"]:
    """Return the step's tokens, with those the host has not seen taken from the last sampling."""
    rows = jnp.maximum(batch.pending_rows, 0)
    return jnp.where(batch.pending_rows >= 0, sampled[rows], batch.token_ids)


def one_token_rows(batch: RaggedBatch, positions: Int[Array, " T"]) -> RaggedBatch:
    """Return the same tokens as rows of one token each, in the same pages.

    Attention then computes a token in one way, whether it came in a chunk or was decoded; a kernel
    has a way of its own for chunks, with another order of summation.
    """
    T = positions.shape[0]
    tokens = jnp.arange(T + 1, dtype=jnp.int32)
    rows = jnp.searchsorted(batch.query_start_loc, tokens[:T], side="right").astype(jnp.int32) - 1
    num_tokens = batch.query_start_loc[-1]
    return RaggedBatch(
        page_table=batch.page_table.at[rows].get(mode="clip"),
        seq_lens=positions + 1,  # 0 for padding, which is at -1
        query_start_loc=jnp.minimum(tokens, num_tokens),
        num_decode_rows=num_tokens,
        num_rows=num_tokens,
    )
