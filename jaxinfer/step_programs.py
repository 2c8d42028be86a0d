"""The compiled programs of a step: what is traced, for which shapes.

Five kinds, whose variants add instead of multiply:

    backbone  keyed by T, the bucket of tokens: cache and packed metadata → cache and hidden states
    sampler   keyed by B, the bucket of sampled rows: hidden states → head → tokens
    decode    keyed by B: both of them in a loop, for rows of one token that need no host in between
    rows      keyed by T: picks the hidden states of prompt tokens to be scored
    score     one: those hidden states → head → log-probabilities
    pool      keyed by T: hidden states → their sums by request
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.batch import SampledTokens
from jaxinfer.compilation import Programs
from jaxinfer.decode_loop import decode_loop
from jaxinfer.forward_batch import BatchLayout, ForwardBatch, one_token_rows, resolve_pending
from jaxinfer.kv_cache import KVCache, PagedAttend, write_token_ids
from jaxinfer.models import Transformer
from jaxinfer.nn.tap import NO_TAP, Tap
from jaxinfer.pure_module import PureModule, abstract
from jaxinfer.runner_config import RunnerConfig, cache_shape
from jaxinfer.sampler import History, Logprobs, sample, token_logprobs
from jaxinfer.sampling_batch import MAX_STOP_IDS, ROW_FIELDS, unpack_sampling
from jaxinfer.sampling_params import MAX_LOGIT_BIAS
from jaxinfer.sharding import query_axes, replicated, vocab_shards
from jaxinfer.surgery import with_steady_experts

SCORED_TOKENS = 32
"""Prompt positions scored by one call of the scoring program."""


class StepPrograms:
    """Traces and compiles the programs of one model on one mesh.

    Args:
        model: Abstract, as built under `nnx.eval_shape`.
        parameters: Arrays by dotted path, each in its sharding, or what they will be: see `fill`.
        mesh: The devices.
        config: The shapes to serve.
        cache: Whose shapes and shardings the backbone takes and returns.
    """

    def __init__(
        self,
        model: Transformer,
        parameters: Mapping[str, Any],
        mesh: jax.sharding.Mesh,
        config: RunnerConfig,
        cache: KVCache,
    ):
        self.config = config
        self.mesh = mesh
        body = with_steady_experts(model) if config.deterministic else model
        self.backbone = PureModule.of(body, parameters)
        self.head = PureModule.of(model.head(), parameters, rename=("projection", model.head_path))
        shape = cache_shape(model.config, config.windows, config.page_size, config.page_dtype)
        self._hidden_size = model.config.hidden_size
        self.vocab_size = model.config.vocab_size
        self.shards = vocab_shards(mesh, self.vocab_size)
        self.whole = replicated(mesh)
        self.abstract_cache = jax.tree.map(abstract, cache)
        self._attend_over = partial(
            PagedAttend,
            layer_groups=shape.layer_groups,
            impl=config.attention_impl,
            sharding=self.abstract_cache.layers[0].k_pages.sharding,
            query_axes=query_axes(mesh, model.config),
        )
        self.compiled = Programs(
            {
                # Few requests at a time are likelier than many.
                **self._variants("sampler", self._lower_sampler, config.row_buckets),
                **self._variants(
                    "decode",
                    self._lower_decode,
                    config.row_buckets if config.num_decode_steps > 1 else (),
                ),
                **self._variants("backbone", self._lower_backbone, config.token_buckets),
                ("score",): self._lower_score,
                **self._variants("rows", self._lower_rows, config.token_buckets),
                **self._variants("pool", self._lower_pool, config.token_buckets),
            }
        )

    @property
    def first(self) -> tuple[tuple[str, int], ...]:
        """The programs with which everything can be served that needs no score of its prompt.

        The largest, since any step fits them, and the smallest backbone, with which one request
        decodes. A sampler for all rows samples one in a few milliseconds more.
        """
        T, B = self.config.token_buckets, self.config.row_buckets
        keys = (("backbone", T[-1]), ("sampler", B[-1]), ("backbone", T[0]))
        return tuple(dict.fromkeys(keys))

    def fill(self, parameters: Mapping[str, jax.Array]) -> None:
        """Put arrays where so far there were descriptions of them."""
        self.backbone = self.backbone.filled(parameters)
        self.head = self.head.filled(parameters)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return float32 [n, V] for hidden states [n, D]: for inspection, compiled on each call."""
        return jax.jit(lambda leaves, x: self.head(leaves)(x))(self.head.leaves, hidden)

    @staticmethod
    def _variants(
        kind: str, lower: Callable[[int], jax.stages.Lowered], sizes: tuple[int, ...]
    ) -> dict[tuple[str, int], Callable[[], jax.stages.Lowered]]:
        return {(kind, size): partial(lower, size) for size in sizes}

    def array(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """What a program takes from the host, whole on each device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)

    def _lower_backbone(self, T: int) -> jax.stages.Lowered:
        layout = self.config.layout(T)
        step = self.jit_backbone(partial(self.backbone_step, layout))
        return step.lower(*self.backbone_arguments(layout))

    def jit_backbone(self, step: Callable[..., Any], *more_shardings: Any) -> Any:
        """Return a step under jit, which returns what `backbone_step` does, and more.

        DONATES its second argument, the cache.
        """
        cache_out = jax.tree.map(lambda x: x.sharding, self.abstract_cache)
        return jax.jit(
            step,
            donate_argnums=1,
            out_shardings=(cache_out, self.whole, self.whole, *more_shardings),
        )

    def backbone_arguments(self, layout: BatchLayout) -> tuple[Any, ...]:
        """What `backbone_step` is called with, as shapes."""
        return (
            self.backbone.abstract,
            self.abstract_cache,
            self.array((layout.size,)),
            self.array((self.config.max_num_seqs,)),
        )

    def backbone_step(
        self,
        layout: BatchLayout,
        leaves: tuple[jax.Array, ...],
        cache: KVCache,
        packed: jax.Array,
        last_sampled: jax.Array,
        make_tap: Callable[[ForwardBatch], Tap] = lambda batch: NO_TAP,
    ) -> tuple[KVCache, jax.Array, jax.Array]:
        """Return the cache, and hidden states of sampling rows [max_num_seqs, D] and of all [T, D].

        DONATES cache.
        """
        batch = layout.unpack(packed)
        token_ids = resolve_pending(batch, last_sampled)
        cache = write_token_ids(cache, token_ids, batch.slot_mapping[0])
        ragged = batch.ragged
        if self.config.deterministic:
            ragged = tuple(one_token_rows(rows, batch.positions) for rows in ragged)
        attend = self._attend_over(cache, ragged, batch.slot_mapping)
        hidden = self.backbone(leaves)(token_ids, batch.positions, attend, make_tap(batch))
        return attend.cache, hidden[batch.sample_tokens], hidden

    def _lower_decode(self, B: int) -> jax.stages.Lowered:
        return jax.jit(
            partial(self._decode_steps, self.config.decode_layout(B)),
            donate_argnums=1,
            out_shardings=self.decode_shardings,
        ).lower(*self.decode_arrays(B))

    @property
    def decode_shardings(self) -> tuple[Any, ...]:
        """Of what the decode steps return."""
        return jax.tree.map(lambda x: x.sharding, self.abstract_cache), self.whole, self.whole

    def decode_arrays(self, B: int) -> tuple[Any, ...]:
        """What the decode steps take, beside their layout."""
        return (
            (self.backbone.abstract, self.head.abstract),
            self.abstract_cache,
            self.array((self.config.decode_layout(B).size,)),
            self.array((self.config.max_num_seqs,)),
            self.array((1 + MAX_STOP_IDS, B)),
            *self._sampling_arrays(B),
        )

    def _decode_steps(
        self,
        layout: BatchLayout,
        leaves: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]],
        cache: KVCache,
        packed: jax.Array,
        last_sampled: jax.Array,
        limits: jax.Array,
        rows: jax.Array,
        bias: jax.Array,
        allowed: jax.Array,
    ) -> tuple[KVCache, SampledTokens, jax.Array]:
        """Return the cache, the results and how many each row has.

        DONATES cache.
        """
        return self.run_decode(
            layout, leaves, cache, packed, last_sampled, limits, rows, bias, allowed
        )[:3]

    def run_decode(
        self,
        layout: BatchLayout,
        leaves: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]],
        cache: KVCache,
        packed: jax.Array,
        last_sampled: jax.Array,
        limits: jax.Array,
        rows: jax.Array,
        bias: jax.Array,
        allowed: jax.Array,
        **processing: Any,
    ) -> tuple[KVCache, SampledTokens, jax.Array, Any]:
        """Return what `decode_loop` does, inside jit."""
        batch = layout.unpack(packed)
        return decode_loop(
            self.backbone(leaves[0]),
            self.head(leaves[1]),
            cache,
            batch,
            resolve_pending(batch, last_sampled),
            limits,
            unpack_sampling(rows, bias, allowed),
            num_steps=self.config.num_decode_steps,
            num_slots=layout.num_slots,
            vocab_size=self.vocab_size,
            max_logprobs=self.config.max_logprobs,
            shards=self.shards,
            attend_over=self._attend_over,
            **processing,
        )

    def _sampling_arrays(self, B: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """A `PackedSampling`, as it reaches the device."""
        return (
            self.array((len(ROW_FIELDS), B)),
            self.array((2, B, MAX_LOGIT_BIAS)),
            self.array((B, -(-self.vocab_size // 32)), jnp.uint32),
        )

    def _lower_sampler(self, B: int) -> jax.stages.Lowered:
        return jax.jit(self._sampler_step, out_shardings=self.whole).lower(*self.sampler_arrays(B))

    def sampler_arrays(self, B: int) -> tuple[Any, ...]:
        """What the sampler takes."""
        config = self.config
        return (
            self.head.abstract,
            self.array((config.max_num_seqs, self._hidden_size), config.dtype),
            self.abstract_cache.token_ids,
            *self._sampling_arrays(B),
            self.array((B, config.max_pages)),
        )

    def _sampler_step(
        self,
        leaves: tuple[jax.Array, ...],
        hidden: jax.Array,
        token_pages: jax.Array,
        rows: jax.Array,
        bias: jax.Array,
        allowed: jax.Array,
        page_table: jax.Array,
    ) -> tuple[SampledTokens, jax.Array]:
        """Return the sampled tokens, and their ids padded to [max_num_seqs] for the next step."""
        B = rows.shape[1]
        inputs = unpack_sampling(rows, bias, allowed)
        logits = self.head(leaves)(hidden[:B])  # [B, V]
        # The token being sampled stands behind all those so far.
        history = History(token_pages=token_pages, page_table=page_table, seq_lens=inputs.positions)
        sampled = sample(
            logits,
            inputs,
            history,
            max_logprobs=self.config.max_logprobs,
            shards=self.shards,
        )
        return sampled, jnp.pad(sampled.token_ids, (0, hidden.shape[0] - B))

    def _lower_rows(self, T: int) -> jax.stages.Lowered:
        hidden = self.array((T, self._hidden_size), self.config.dtype)
        return jax.jit(lambda hidden, indices: hidden[indices], out_shardings=self.whole).lower(
            hidden, self.array((SCORED_TOKENS,))
        )

    def _lower_pool(self, T: int) -> jax.stages.Lowered:
        hidden = self.array((T, self._hidden_size), self.config.dtype)
        return jax.jit(self._pool_step, out_shardings=self.whole).lower(hidden, self.array((T,)))

    def _pool_step(self, hidden: jax.Array, slots: jax.Array) -> jax.Array:
        """Return float32 [max_num_seqs, D]: sums by slot; tokens of no slot have the number B."""
        B = self.config.max_num_seqs
        return jax.ops.segment_sum(hidden.astype(jnp.float32), slots, num_segments=B + 1)[:B]

    def _lower_score(self) -> jax.stages.Lowered:
        hidden = self.array((SCORED_TOKENS, self._hidden_size), self.config.dtype)
        return jax.jit(self._score_step, out_shardings=self.whole).lower(
            self.head.abstract, hidden, self.array((SCORED_TOKENS,))
        )

    def _score_step(
        self, leaves: tuple[jax.Array, ...], hidden: jax.Array, token_ids: jax.Array
    ) -> Logprobs:
        return token_logprobs(
            self.head(leaves)(hidden), token_ids, self.config.max_logprobs, self.shards
        )
