"""The shapes that a runner serves: what its programs are compiled for. Knows no program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxinfer.compilation import buckets
from jaxinfer.forward_batch import BatchLayout
from jaxinfer.kv_cache import CacheShape
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.models import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """The shapes that a runner serves.

    Attributes:
        max_num_seqs: Most rows in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_model_len: Longest sequence, tokens.
        num_pages: Pages of the full group, which holds whole sequences.
        page_size: Tokens per page.
        max_logprobs: Alternatives computed per token.
        dtype: Of activations.
        kv_cache_dtype: Of KV pages; None: that of activations.
        logits_processors: Those that are compiled before they are asked for.
        windows: Each has a group of pages of its own.
        num_window_pages: Pages of each of these groups.
        num_decode_steps: Most decode steps in one dispatch.
        attention_impl: "cpu" for the C++ kernel; else see `pallas_kernels.paged_attention`.
        deterministic: There is one bucket of tokens and one of rows, and each token is a row.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int
    max_logprobs: int
    dtype: Any
    windows: tuple[int, ...] = ()
    num_window_pages: int = 0
    num_decode_steps: int = 1
    attention_impl: str = "auto"
    kv_cache_dtype: Any = None
    deterministic: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()

    @property
    def page_dtype(self) -> Any:
        """Of KV pages."""
        return self.dtype if self.kv_cache_dtype is None else self.kv_cache_dtype

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    @property
    def group_pages(self) -> tuple[int, ...]:
        """Pages by group: the full one, then one for each window."""
        return (self.num_pages, *(self.num_window_pages for _ in self.windows))

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """T: the token counts to which steps are padded."""
        most = self.max_num_batched_tokens
        return (most,) if self.deterministic else buckets(most)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """B: the row counts to which samplings are padded."""
        return (self.max_num_seqs,) if self.deterministic else buckets(self.max_num_seqs)

    def layout(self, num_tokens: int) -> BatchLayout:
        """The packed metadata of a token bucket."""
        return self._layout(num_tokens, self.max_num_seqs)

    def decode_layout(self, num_rows: int) -> BatchLayout:
        """The packed metadata of a row bucket, one token a row."""
        return self._layout(num_rows, num_rows)

    def _layout(self, num_tokens: int, num_rows: int) -> BatchLayout:
        return BatchLayout(
            num_tokens=num_tokens,
            max_num_seqs=num_rows,
            max_pages=self.max_pages,
            num_slots=tuple(n * self.page_size for n in self.group_pages),
            page_size=self.page_size,
        )


def cache_shape(
    model_config: ModelConfig, windows: tuple[int, ...], page_size: int, dtype: Any
) -> CacheShape:
    """What a page of each group holds, if these windows have groups of their own."""
    group_of: dict[int | None, int] = {window: i for i, window in enumerate(windows, start=1)}
    layers = range(model_config.num_hidden_layers)
    return CacheShape(
        layer_groups=tuple(group_of.get(model_config.window_of(layer), 0) for layer in layers),
        num_kv_heads=model_config.num_key_value_heads,
        head_dim=model_config.head_dim,
        page_size=page_size,
        dtype=dtype,
        has_values=model_config.latent is None,
    )
