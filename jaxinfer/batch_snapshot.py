"""A running batch of `LLM.generate` as bytes: the engine's snapshot, and the text side around it.

Knows the batch's requests, how far each sample is, and what was learnt of it; the engine's part is
bytes to it.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.errors import SnapshotError
from jaxinfer.generation import Generation, Sample
from jaxinfer.input_processor import PreparedRequest, per_sample
from jaxinfer.request import FinishReason, Pooling, TokenLogprobs, TokenOutput
from jaxinfer.snapshot import FindProcessor, pack, params_of, params_record, unpack
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Batch:
    """A batch between two steps.

    Attributes:
        generations: All of its requests, those that have ended included.
        waiting: Samples that the engine has not been given, by index of their generation.
    """

    generations: Sequence[Generation]
    waiting: Sequence[tuple[int, Generation, Sample]]


def pack_batch(batch: Batch, engine: bytes) -> bytes:
    """Return a batch as bytes, around those of the engine.

    Raises:
        SnapshotError: A request's captures would be lost, or the edits of one that has not ended.
    """
    for g in batch.generations:
        hooks = g.prepared.hooks
        if hooks is not None and (hooks.capture or not g.finished):
            raise SnapshotError(
                f"request {g.request_id!r} captures or edits inside the model, which a snapshot "
                "does not hold; take it before or after"
            )
    waiting = {(index, sample.index) for index, _, sample in batch.waiting}
    return pack(
        {
            "engine": engine.decode(),
            "requests": [
                _generation_record(g, [(i, s.index) in waiting for s in g.samples])
                for i, g in enumerate(batch.generations)
            ],
        }
    )


def unpack_batch(data: bytes, tokenizer: Tokenizer, find: FindProcessor) -> tuple[Batch, bytes]:
    """Return the batch, with its texts as far as they were, and the engine's bytes.

    Raises:
        SnapshotError: It is no snapshot, damaged, or needs a processor that is not there.
    """
    content = unpack(data, "engine")
    generations, waiting = [], []
    for index, record in enumerate(content["requests"]):
        generation = _generation_of(record, tokenizer, find)
        generations.append(generation)
        for sample, known in zip(generation.samples, record["samples"], strict=True):
            if known["waits"]:
                waiting.append((index, generation, sample))
    return Batch(generations, waiting), content["engine"].encode()


def _generation_record(generation: Generation, waits: Sequence[bool]) -> dict[str, Any]:
    prepared = generation.prepared
    return {
        "request_id": prepared.request_id,
        "prompt": prepared.prompt,
        "prompt_token_ids": list(prepared.prompt_token_ids),
        "params": params_record(prepared.params),
        "seeds": list(prepared.seeds),
        "priority": prepared.priority,
        "cache_salt": prepared.cache_salt,
        "age_s": time.monotonic() - prepared.arrival_time,
        "pooling": prepared.pooling,
        "num_cached_tokens": generation.num_cached_tokens,
        "prompt_logprobs": generation.unread_prompt_logprobs
        and [e and _entry_record(e) for e in generation.unread_prompt_logprobs],
        "embedding": _vector_record(generation.unread_embedding),
        "samples": [
            {
                "waits": wait,
                "token_ids": sample.new_token_ids,
                "logprobs": [_entry_record(entry) for entry in sample.new_logprobs],
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "error": sample.error,
            }
            for sample, wait in zip(generation.samples, waits, strict=True)
        ],
    }


def _generation_of(
    record: Mapping[str, Any], tokenizer: Tokenizer, find: FindProcessor
) -> Generation:
    params = params_of(record["params"], find)
    now = time.monotonic()
    prepared = PreparedRequest(
        request_id=record["request_id"],
        prompt=record["prompt"],
        prompt_token_ids=tuple(record["prompt_token_ids"]),
        params=params,
        sample_params=per_sample(params),
        seeds=tuple(record["seeds"]),
        priority=record["priority"],
        cache_salt=record["cache_salt"],
        arrival_time=now - record["age_s"],
        pooling=None if record["pooling"] is None else Pooling(record["pooling"]),
    )
    generation = Generation(prepared, tokenizer, final_only=True)
    prompt_logprobs = record["prompt_logprobs"]
    for sample, known in zip(generation.samples, record["samples"], strict=True):
        reason = known["finish_reason"]
        if not known["token_ids"] and reason is None:
            continue
        first = sample.index == 0
        # All at once: the text does not depend on the pieces in which tokens come.
        generation.push(
            sample,
            TokenOutput(
                request_id=prepared.sample_id(sample.index),
                new_token_ids=tuple(known["token_ids"]),
                logprobs=tuple(map(_entry_of, known["logprobs"])) or None,
                prompt_logprobs=tuple(e and _entry_of(e) for e in prompt_logprobs)
                if prompt_logprobs and first
                else None,
                finish_reason=None if reason is None else FinishReason(reason),
                stop_reason=known["stop_reason"],
                num_cached_tokens=record["num_cached_tokens"],
                error=known["error"],
                pooled=_vector_of(record["embedding"]) if first else None,
            ),
            now,
        )
    return generation


def _entry_record(entry: TokenLogprobs) -> list[Any]:
    asked = [list(pair) for pair in entry.asked]
    return [entry.logprob, entry.rank, [*entry.top_token_ids], [*entry.top_logprobs], asked]


def _entry_of(record: Sequence[Any]) -> TokenLogprobs:
    logprob, rank, ids, values, asked = record
    return TokenLogprobs(
        logprob=logprob,
        rank=rank,
        top_token_ids=tuple(ids),
        top_logprobs=tuple(values),
        asked=tuple((value, its_rank) for value, its_rank in asked),
    )


def _vector_record(vector: Any) -> str | None:
    if vector is None:
        return None
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def _vector_of(record: str | None) -> np.ndarray | None:
    return None if record is None else np.frombuffer(base64.b64decode(record), "<f4").copy()
