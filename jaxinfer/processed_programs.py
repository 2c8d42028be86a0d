"""The sampler and the decode loop with logits processors in them: programs of their own.

Steps in which no row has a processor never come here, and run the programs they always ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.batch import SampledTokens
from jaxinfer.compilation import Programs
from jaxinfer.forward_batch import BatchLayout
from jaxinfer.kv_cache import KVCache
from jaxinfer.processing import ProcessorKind, States, load_states, process, store_states
from jaxinfer.pure_module import abstract
from jaxinfer.sampler import History, sample_processed
from jaxinfer.sampling_batch import unpack_sampling
from jaxinfer.step_programs import StepPrograms


class ProcessedPrograms:
    """Traces and compiles what a set of processors needs, keyed as in `StepPrograms`.

    Args:
        plain: The programs without processors.
        kinds: The set.
        stored: The states on the device, whose shapes and shardings the programs take and return.
    """

    def __init__(self, plain: StepPrograms, kinds: Sequence[ProcessorKind], stored: States):
        self._plain = plain
        self._kinds = tuple(kinds)
        self._stored = jax.tree.map(abstract, stored)
        rows = plain.config.row_buckets
        decode = rows if plain.config.num_decode_steps > 1 else ()
        self.compiled = Programs(
            {
                **{("sampler", B): partial(self._lower_sampler, B) for B in rows},
                **{("decode", B): partial(self._lower_decode, B) for B in decode},
            }
        )

    @property
    def first(self) -> tuple[tuple[str, int], ...]:
        """The one with which every step can be served."""
        return (("sampler", self._plain.config.row_buckets[-1]),)

    def _arrays(self, B: int) -> tuple[Any, ...]:
        """What a step brings: `packed` and `initial` of `ProcessorSlots.pack`."""
        initial = tuple(
            tuple(self._plain.array((B, *shape), dtype) for shape, dtype in kind.leaves)
            for kind in self._kinds
        )
        return self._plain.array((2 + len(self._kinds), B)), initial

    def _lower_sampler(self, B: int) -> jax.stages.Lowered:
        plain = self._plain
        return jax.jit(
            self._sampler_step, donate_argnames="stored", out_shardings=plain.whole
        ).lower(*plain.sampler_arrays(B), self._stored, *self._arrays(B))

    def _sampler_step(
        self,
        leaves: tuple[jax.Array, ...],
        hidden: jax.Array,
        token_pages: jax.Array,
        rows: jax.Array,
        bias: jax.Array,
        allowed: jax.Array,
        page_table: jax.Array,
        stored: States,
        packed: jax.Array,
        initial: States,
    ) -> tuple[SampledTokens, jax.Array, States]:
        """Return what `StepPrograms` does, and the states.

        DONATES stored.
        """
        B = rows.shape[1]
        inputs = unpack_sampling(rows, bias, allowed)
        logits = self._plain.head(leaves)(hidden[:B])  # [B, V]
        history = History(token_pages=token_pages, page_table=page_table, seq_lens=inputs.positions)
        states = load_states(stored, initial, packed, inputs.positions)
        sampled, states = sample_processed(
            logits,
            inputs,
            history,
            lambda x: process(self._kinds, x, states, packed[2:] != 0, inputs, history),
            max_logprobs=self._plain.config.max_logprobs,
            shards=self._plain.shards,
        )
        stored = store_states(stored, states, packed, inputs.positions)
        return sampled, jnp.pad(sampled.token_ids, (0, hidden.shape[0] - B)), stored

    def _lower_decode(self, B: int) -> jax.stages.Lowered:
        plain = self._plain
        return jax.jit(
            partial(self._decode_steps, plain.config.decode_layout(B)),
            donate_argnums=(1, 8),
            out_shardings=(*plain.decode_shardings, plain.whole),
        ).lower(*plain.decode_arrays(B), self._stored, *self._arrays(B))

    def _decode_steps(
        self,
        layout: BatchLayout,
        leaves: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]],
        cache: KVCache,
        packed_batch: jax.Array,
        last_sampled: jax.Array,
        limits: jax.Array,
        rows: jax.Array,
        bias: jax.Array,
        allowed: jax.Array,
        stored: States,
        packed: jax.Array,
        initial: States,
    ) -> tuple[KVCache, SampledTokens, jax.Array, States]:
        """Return what `StepPrograms` does, and the states.

        DONATES cache, stored.
        """
        first = unpack_sampling(rows, bias, allowed).positions
        uses = packed[2:] != 0
        cache, sampled, counts, states = self._plain.run_decode(
            layout,
            leaves,
            cache,
            packed_batch,
            last_sampled,
            limits,
            rows,
            bias,
            allowed,
            process=lambda x, states, inputs, history: process(
                self._kinds, x, states, uses, inputs, history
            ),
            states=load_states(stored, initial, packed, first),
        )
        return cache, sampled, counts, store_states(stored, states, packed, first + counts - 1)
