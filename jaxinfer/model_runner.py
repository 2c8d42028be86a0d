"""A `StepPlan` in, tokens out: pads to buckets, calls compiled programs, fetches results.

Owns everything on the device: weights, cache, compiled programs. Knows no queue and no policy.

A step is two programs whose variants add instead of multiply: the backbone, keyed by the bucket of
tokens, and head plus sampler, keyed by the bucket of sampled rows. Prompt log-probabilities take
two more, run only for requests that ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.batch import SampledTokens, ScheduledRow, StepPlan, StepResult
from jaxinfer.compilation import Programs, bucket_of, buckets
from jaxinfer.forward_batch import BatchLayout, resolve_pending
from jaxinfer.kv_cache import CacheShape, KVCache, PagedAttend, make_cache, write_token_ids
from jaxinfer.models import ModelConfig, Transformer, flat_parameters
from jaxinfer.request import Request, TokenLogprobs
from jaxinfer.sampler import History, Logprobs, sample, token_logprobs
from jaxinfer.sampling_batch import (
    ROW_FIELDS,
    SamplingPacker,
    neutral_bias,
    neutral_mask,
    unpack_sampling,
)
from jaxinfer.sharding import logical, replicated

SCORED_TOKENS = 32
"""Prompt positions scored by one call of the scoring program."""


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """The shapes that a runner serves.

    Attributes:
        max_num_seqs: Most rows in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_model_len: Longest sequence, tokens.
        num_pages: Pages of KV memory.
        page_size: Tokens per page.
        max_logprobs: Alternatives computed per token.
        dtype: Of activations and KV pages.
        attention_impl: See `pallas_kernels.paged_attention`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int
    max_logprobs: int
    dtype: Any
    attention_impl: str = "auto"

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    def layout(self, num_tokens: int) -> BatchLayout:
        """The packed metadata of a token bucket."""
        return BatchLayout(
            num_tokens=num_tokens,
            max_num_seqs=self.max_num_seqs,
            max_pages=self.max_pages,
            num_slots=self.num_pages * self.page_size,
            page_size=self.page_size,
        )


@dataclass(frozen=True)
class Hidden:
    """What the backbone leaves on the device.

    Attributes:
        sampled: [B, D], hidden states of the sampling rows.
        tokens: [T, D], hidden states of all tokens.
    """

    sampled: jax.Array
    tokens: jax.Array


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of up to `SCORED_TOKENS` consecutive prompt tokens, on the device.

    Attributes:
        request: Whose prompt.
        count: Entries that mean something.
        scores: The log-probabilities.
    """

    request: Request
    count: int
    scores: Logprobs


@dataclass(frozen=True)
class InFlight:
    """A sampled step that has not been fetched.

    Attributes:
        sampled: The tokens; None if the step samples none.
        prompt_scores: Scored parts of prompts, in order.
    """

    sampled: SampledTokens | None
    prompt_scores: tuple[PromptScores, ...]


class ModelRunner:
    """Runs steps of one model on one mesh.

    Args:
        model_config: The model's sizes.
        model: Abstract, as built under `nnx.eval_shape`.
        parameters: Arrays by dotted path, each in its sharding.
        mesh: The devices.
        config: The shapes to serve.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        model: Transformer,
        parameters: Mapping[str, jax.Array],
        mesh: jax.sharding.Mesh,
        config: RunnerConfig,
    ):
        self.config = config
        self.model_config = model_config
        self._mesh = mesh
        self._backbone = _Function.of(model, parameters)
        self._head = _Function.of(model.head(), parameters, rename=("projection", model.head_path))
        self._token_buckets = buckets(config.max_num_batched_tokens)
        self._row_buckets = buckets(config.max_num_seqs)
        self._packer = SamplingPacker(model_config.vocab_size)
        kv_sharding = logical(mesh, None, "kv_heads", None, None)
        self._cache_shardings = (kv_sharding, replicated(mesh))
        shape = CacheShape(
            num_layers=model_config.num_hidden_layers,
            num_kv_heads=model_config.num_key_value_heads,
            head_dim=model_config.head_dim,
            page_size=config.page_size,
            dtype=config.dtype,
        )
        self._cache = make_cache(shape, config.num_pages, self._cache_shardings)
        self._last_sampled = self._put(np.zeros(config.max_num_seqs, np.int32))
        self._neutral = {b: self._neutral_parts(b) for b in self._row_buckets}
        self.programs = Programs(self._lowerings())

    def warmup(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile every program, then call each once so that its first use in service is fast."""
        self.programs.compile_all(on_progress)
        for T in self._token_buckets:
            hidden = self._call_backbone(T, self.config.layout(T).pack(StepPlan(rows=())))
            self._score_rows(T, hidden.tokens, np.zeros(SCORED_TOKENS, np.int32))
        for B in self._row_buckets:
            self._call_sampler(B, hidden.sampled, self._packer.pack((), B), None)
        jax.block_until_ready(self._last_sampled)

    def forward(self, plan: StepPlan) -> Hidden:
        """Dispatch the backbone over the plan's tokens; returns before it is done."""
        T = bucket_of(plan.num_tokens, self._token_buckets)
        return self._call_backbone(T, self.config.layout(T).pack(plan))

    def sample(
        self, plan: StepPlan, hidden: Hidden, masks: Mapping[str, np.ndarray] | None = None
    ) -> InFlight:
        """Dispatch head and sampler. All earlier tokens of the plan must have reached the host.

        Args:
            plan: The step.
            hidden: What `forward` returned for it.
            masks: request_id → uint32 [ceil(V / 32)], bit set for the tokens that are allowed.
        """
        scores = self._score_prompts(plan, hidden)
        rows = plan.sampling_rows
        if not rows:
            return InFlight(None, scores)
        B = bucket_of(len(rows), self._row_buckets)
        packed = self._packer.pack(rows, B, extra_masks=masks)
        page_table = self._page_table(rows, B)
        return InFlight(self._call_sampler(B, hidden.sampled, packed, page_table), scores)

    def fetch(self, plan: StepPlan, step: InFlight) -> StepResult:
        """Wait for a step's tokens and bring them to the host; alternatives only if asked for."""
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        for part in step.prompt_scores:
            request = part.request
            entries = _entries(part.scores, [request.params.prompt_logprobs] * part.count)
            earlier = prompt_logprobs.get(request.request_id, ())
            prompt_logprobs[request.request_id] = (*earlier, *entries)
        rows = plan.sampling_rows
        if step.sampled is None:
            return StepResult(
                token_ids=(), corrupted=(), logprobs=(), prompt_logprobs=prompt_logprobs
            )
        token_ids, corrupted = jax.device_get((step.sampled.token_ids, step.sampled.corrupted))
        widths = [row.request.params.logprobs for row in rows]
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if any(width is not None for width in widths):
            s = step.sampled
            scores = Logprobs(s.logprobs, s.ranks, s.top_token_ids, s.top_logprobs)
            logprobs = _entries(scores, widths)
        return StepResult(
            token_ids=tuple(token_ids[: len(rows)].tolist()),
            corrupted=tuple(corrupted[: len(rows)].tolist()),
            logprobs=tuple(logprobs),
            prompt_logprobs=prompt_logprobs,
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return float32 [n, V] for hidden states [n, D]: for inspection, compiled on each call."""
        return jax.jit(lambda leaves, x: self._head.module(leaves)(x))(self._head.leaves, hidden)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self.programs)

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a finished request."""
        self._packer.forget(request_id)

    # --- programs: each method below `_lowerings` is traced once per bucket -----------------------

    def _lowerings(self) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        """How to lower every program, most likely needed first."""
        cfg, D, V = self.config, self.model_config.hidden_size, self.model_config.vocab_size
        whole = replicated(self._mesh)

        def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

        cache = jax.tree.map(_abstract, self._cache)
        cache_out = jax.tree.map(lambda x: x.sharding, cache)
        last_sampled = array((cfg.max_num_seqs,))

        def backbone(T: int) -> jax.stages.Lowered:
            layout = cfg.layout(T)
            return jax.jit(
                partial(self._trace_backbone, layout),
                donate_argnums=1,
                out_shardings=(cache_out, whole, whole),
            ).lower(self._backbone.abstract, cache, array((layout.size,)), last_sampled)

        def sampler(B: int) -> jax.stages.Lowered:
            bias, allowed, _ = self._neutral[B]
            return jax.jit(self._trace_sampler, out_shardings=whole).lower(
                self._head.abstract,
                array((cfg.max_num_seqs, D), cfg.dtype),
                cache.token_ids,
                array((len(ROW_FIELDS), B)),
                _abstract(bias),
                _abstract(allowed),
                array((B, cfg.max_pages)),
            )

        def rows(T: int) -> jax.stages.Lowered:
            hidden = array((T, D), cfg.dtype)
            return jax.jit(_take_rows, out_shardings=whole).lower(hidden, array((SCORED_TOKENS,)))

        def score() -> jax.stages.Lowered:
            return jax.jit(self._trace_score, out_shardings=whole).lower(
                self._head.abstract, array((SCORED_TOKENS, D), cfg.dtype), array((SCORED_TOKENS,))
            )

        return {
            **{("backbone", T): partial(backbone, T) for T in reversed(self._token_buckets)},
            **{("sampler", B): partial(sampler, B) for B in self._row_buckets},
            ("score",): score,
            **{("rows", T): partial(rows, T) for T in self._token_buckets},
        }

    def _trace_backbone(
        self,
        layout: BatchLayout,
        leaves: tuple[jax.Array, ...],
        cache: KVCache,
        packed: jax.Array,
        last_sampled: jax.Array,
    ) -> tuple[KVCache, jax.Array, jax.Array]:
        """DONATES cache."""
        batch = layout.unpack(packed)
        token_ids = resolve_pending(batch, last_sampled)
        cache = write_token_ids(cache, token_ids, batch.slot_mapping)
        attend = PagedAttend(
            cache, batch.ragged, batch.slot_mapping, impl=self.config.attention_impl
        )
        hidden = self._backbone.module(leaves)(token_ids, batch.positions, attend)  # [T, D]
        return attend.cache, hidden[batch.sample_tokens], hidden

    def _trace_sampler(
        self,
        leaves: tuple[jax.Array, ...],
        hidden: jax.Array,
        token_pages: jax.Array,
        rows: jax.Array,
        bias: jax.Array,
        allowed: jax.Array,
        page_table: jax.Array,
    ) -> tuple[SampledTokens, jax.Array]:
        B = rows.shape[1]
        inputs = unpack_sampling(rows, bias, allowed)
        logits = self._head.module(leaves)(hidden[:B])  # [B, V]
        # The token being sampled stands behind all those so far.
        history = History(
            token_pages=token_pages, page_table=page_table, seq_lens=inputs.positions
        )
        sampled = sample(logits, inputs, history, max_logprobs=self.config.max_logprobs)
        return sampled, jnp.pad(sampled.token_ids, (0, hidden.shape[0] - B))

    def _trace_score(
        self, leaves: tuple[jax.Array, ...], hidden: jax.Array, token_ids: jax.Array
    ) -> Logprobs:
        logits = self._head.module(leaves)(hidden)
        return token_logprobs(logits, token_ids, self.config.max_logprobs)

    # --- calls ------------------------------------------------------------------------------------

    def _call_backbone(self, T: int, packed: np.ndarray) -> Hidden:
        self._cache, sampled, tokens = self.programs["backbone", T](
            self._backbone.leaves, self._cache, packed, self._last_sampled
        )
        return Hidden(sampled, tokens)

    def _call_sampler(
        self, B: int, hidden: jax.Array, packed: Any, page_table: np.ndarray | None
    ) -> SampledTokens:
        bias, allowed, no_pages = self._neutral[B]
        sampled, self._last_sampled = self.programs["sampler", B](
            self._head.leaves,
            hidden,
            self._cache.token_ids,
            packed.rows,
            bias if packed.bias is None else packed.bias,
            allowed if packed.allowed is None else packed.allowed,
            no_pages if page_table is None else page_table,
        )
        return sampled

    def _score_rows(
        self, T: int, hidden: jax.Array, indices: np.ndarray, token_ids: np.ndarray | None = None
    ) -> Logprobs:
        if token_ids is None:
            token_ids = np.zeros(SCORED_TOKENS, np.int32)
        rows = self.programs["rows", T](hidden, indices)
        return self.programs["score",](self._head.leaves, rows, token_ids)

    def _score_prompts(
        self, plan: StepPlan, hidden: Hidden
    ) -> tuple[PromptScores, ...]:
        """Score the prompt tokens behind those of this step, for the requests that ask."""
        parts = []
        first = 0
        for row in plan.rows:
            request = row.request
            if request.params.prompt_logprobs is not None:
                T = hidden.tokens.shape[0]
                # The state at position p tells about the token at p + 1.
                end = min(row.end, request.num_prompt_tokens - 1)
                for start in range(row.start, end, SCORED_TOKENS):
                    n = min(SCORED_TOKENS, end - start)
                    indices, targets = np.zeros((2, SCORED_TOKENS), np.int32)
                    indices[:n] = first + (start - row.start) + np.arange(n)
                    targets[:n] = request.token_ids[start + 1 : start + 1 + n]
                    scores = self._score_rows(T, hidden.tokens, indices, targets)
                    parts.append(PromptScores(request, n, scores))
            first += row.num_scheduled_tokens
        return tuple(parts)

    def _page_table(self, rows: tuple[ScheduledRow, ...], B: int) -> np.ndarray | None:
        """Pages of the rows whose history the sampler must read; None if there are none."""
        if not any(row.request.params.has_penalties for row in rows):
            return None
        table = np.zeros((B, self.config.max_pages), np.int32)
        for i, row in enumerate(rows):
            table[i, : len(row.request.page_ids)] = row.request.page_ids
        return table

    def _neutral_parts(self, B: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the sampler is given where no row asks for more; put on the device once."""
        V = self.model_config.vocab_size
        no_pages = np.zeros((B, self.config.max_pages), np.int32)
        return (
            self._put(neutral_bias(B, V)),
            self._put(neutral_mask(B, V)),
            self._put(no_pages),
        )

    def _put(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, replicated(self._mesh))


@dataclass(frozen=True)
class _Function:
    """A module used as a function of its leaves: split once, merged again inside jit.

    `nnx.jit` would do both at every call, at 14 ms for 32 layers; a compiled program called with a
    flat list of leaves takes 0.2.
    """

    graphdef: nnx.GraphDef
    treedef: Any
    leaves: tuple[jax.Array, ...]

    @classmethod
    def of(
        cls,
        module: nnx.Module,
        parameters: Mapping[str, jax.Array],
        rename: tuple[str, str] = ("", ""),
    ) -> _Function:
        """Fill an abstract module; a leading `rename[0]` of its paths is spelled `rename[1]`."""
        graphdef, state = nnx.split(module)
        leaves = tuple(
            parameters[rename[1] + path.removeprefix(rename[0])] for path in flat_parameters(state)
        )
        return cls(graphdef, jax.tree.structure(state), leaves)

    @property
    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(_abstract(leaf) for leaf in self.leaves)

    def module(self, leaves: tuple[jax.Array, ...]) -> Any:
        """The module with these leaves, inside jit."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _take_rows(hidden: jax.Array, indices: jax.Array) -> jax.Array:
    return hidden[indices]


def _entries(scores: Logprobs, widths: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Fetch the first rows of `scores`, each with as many alternatives as asked; None for None."""
    columns = (np.asarray(x)[: len(widths)].tolist() for x in jax.device_get(scores))
    return [
        None
        if width is None
        else TokenLogprobs(
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(ids[:width]),
            top_logprobs=tuple(values[:width]),
        )
        for logprob, rank, ids, values, width in zip(*columns, widths, strict=True)
    ]
