"""Live requests as bytes and back: tokens, parameters, seeds and processor states; no pages.

Keys and values are not saved. A restored request is one that was preempted: its tokens are computed
again, in one pass, and the next one is drawn with the key it would have been drawn with. So a
snapshot is small, and fits an engine with other pages, batches or devices; what decides the tokens
must be the same, and is compared by name.

Plain JSON behind a line with a digest: nothing in it is executed, whoever wrote it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.errors import SnapshotError
from jaxinfer.logits_processor import LogitsProcessor
from jaxinfer.processing import ProcessorKind
from jaxinfer.request import Pooling, Request, RequestStatus
from jaxinfer.sampling_params import SamplingParams

_MAGIC = b"jaxinfer-snapshot-1 "

# From a name to the processor of that name with the given leaves as its state.
type FindProcessor = Callable[[str, list[np.ndarray]], LogitsProcessor]


def pack(content: Mapping[str, Any]) -> bytes:
    """Return JSON values as bytes that tell if they are damaged."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return _MAGIC + _digest(text) + b"\n" + text


def unpack(data: bytes, key: str) -> dict[str, Any]:
    """Return what `pack` was given.

    Args:
        data: From `pack`.
        key: What content of the wanted kind has: a batch's differs from an engine's.

    Raises:
        SnapshotError: It is no snapshot, one of another version or kind, or damaged.
    """
    if not isinstance(data, bytes):
        raise SnapshotError(f"a snapshot is bytes, got {type(data).__name__}")
    head, _, text = data.partition(b"\n")
    if not head.startswith(_MAGIC):
        raise SnapshotError(
            f"expected a snapshot that begins with {_MAGIC.decode()!r}, got {data[:24]!r}: it is"
            " another file, or of another version of jaxinfer"
        )
    if head[len(_MAGIC) :] != _digest(text):
        raise SnapshotError("the snapshot is damaged: its digest does not match; take another one")
    content = json.loads(text)
    if key not in content:
        raise SnapshotError(
            "a snapshot of LLM goes to LLM.restore, and one of an engine to Engine.restore; this is"
            " the other kind"
        )
    return content


def check_made_for(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a snapshot of another model or of settings that give other tokens.

    Raises:
        SnapshotError: Names all that differs.
    """
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    if names:
        parts = [f"{n} was {theirs.get(n)!r} and is {ours.get(n)!r}" for n in names]
        raise SnapshotError(
            "the snapshot was taken of another model or configuration, and would go on with other"
            f" tokens: {'; '.join(parts)}"
        )


def request_record(request: Request, states: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
    """Return a live request as JSON values.

    Args:
        request: Without tokens in flight.
        states: Of each of its processors, the leaves before the next token.
    """
    return {
        "request_id": request.request_id,
        "prompt_token_ids": list(request.prompt_token_ids),
        "output_token_ids": request.output_token_ids,
        "params": params_record(request.params),
        "seed": request.seed,
        "max_total_tokens": request.max_total_tokens,
        "eos_token_ids": sorted(request.eos_token_ids),
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "pooling": request.pooling,
        "age_s": time.monotonic() - request.arrival_time,
        "was_running": request.status is RequestStatus.RUNNING,
        "num_preemptions": request.num_preemptions,
        "num_cached_tokens": request.num_cached_tokens,
        "has_first_token": request.first_token_time is not None,
        "states": [[_array_record(leaf) for leaf in leaves] for leaves in states],
    }


def request_of(
    record: Mapping[str, Any], find: FindProcessor
) -> tuple[Request, list[list[np.ndarray]]]:
    """Return the waiting request of a record, and its processors' states.

    Raises:
        SnapshotError: The record makes no sense.
        InvalidRequestError: Its parameters do not.
    """
    now = time.monotonic()
    pooling = record["pooling"]
    request = Request(
        request_id=record["request_id"],
        prompt_token_ids=record["prompt_token_ids"],
        params=params_of(record["params"], find),
        seed=record["seed"],
        max_total_tokens=record["max_total_tokens"],
        eos_token_ids=frozenset(record["eos_token_ids"]),
        priority=record["priority"],
        cache_salt=record["cache_salt"],
        pooling=None if pooling is None else Pooling(pooling),
        arrival_time=now - record["age_s"],
    )
    request.token_ids += record["output_token_ids"]
    request.num_preemptions = record["num_preemptions"] + record["was_running"]
    request.num_cached_tokens = record["num_cached_tokens"]
    if record["has_first_token"]:
        request.first_token_time = request.first_scheduled_time = now
    if request.num_tokens >= request.max_total_tokens:
        raise SnapshotError(f"request {request.request_id!r} has ended, yet is in the snapshot")
    return request, [[_array_of(leaf) for leaf in leaves] for leaves in record["states"]]


def params_record(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as JSON values."""
    values: dict[str, Any] = {
        f.name: getattr(params, f.name)
        for f in dataclasses.fields(params)
        if f.name not in ("logits_processors", "logit_bias")
    }
    values["logit_bias"] = None if params.logit_bias is None else [*params.logit_bias.items()]
    values["logits_processors"] = [
        {"name": p.name, "state": [_array_record(leaf) for leaf in _leaves(p)]}
        for p in params.processors
    ]
    return values


def params_of(record: Mapping[str, Any], find: FindProcessor) -> SamplingParams:
    """Return the sampling parameters of a record.

    Raises:
        InvalidRequestError: They are out of range.
        SnapshotError: There is no processor of a name.
    """
    values = dict(record)
    if values["logit_bias"] is not None:
        values["logit_bias"] = dict(values["logit_bias"])
    values["logits_processors"] = [
        find(p["name"], [_array_of(leaf) for leaf in p["state"]])
        for p in values["logits_processors"]
    ]
    return SamplingParams(**values)


def _leaves(processor: LogitsProcessor) -> list[np.ndarray]:
    return ProcessorKind.of(processor)[1]


def _array_record(array: np.ndarray) -> list[Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return [array.dtype.name, list(array.shape), data]


def _array_of(record: Sequence[Any]) -> np.ndarray:
    name, shape, data = record
    return np.frombuffer(base64.b64decode(data), np.dtype(name)).reshape(shape).copy()


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()
