"""The host's half of the sampler: `ScheduledRow`s → a few numpy arrays → `SamplingInputs`.

Knows requests and their parameters, never logits. Everything a row always needs goes into one small
int32 blob (floats and seeds as their bits); the two wide parts, logit bias and allowed ids, are
built only for steps in which some row uses them. For all other steps the runner passes
`neutral_bias` and `neutral_mask`, put on the device once per bucket, so shapes never change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from jaxinfer.batch import ScheduledRow
from jaxinfer.request import Request
from jaxinfer.sampler import SamplingInputs
from jaxinfer.sampling_params import MAX_LOGIT_BIAS

FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INT_FIELDS = ("top_k", "seed_high", "seed_low", "position", "prompt_len", "flags")
ROW_FIELDS = FLOAT_FIELDS + INT_FIELDS
WANTS_LOGPROBS, HAS_BIAS, HAS_MASK = 1, 2, 4  # bits of `flags`

# vLLM's limit: below it a division by the temperature amplifies rounding, not preference.
MIN_TEMPERATURE = 1e-5
# Where float32 arithmetic on logits stays finite.
MAX_FACTOR = 1e30

MAX_STOP_IDS = 8
"""End tokens of a row that several decode steps look out for. Of a row with more the host finds
some end only afterwards, and drops what came behind it."""

_F = {name: i for i, name in enumerate(ROW_FIELDS)}
# 1 is "no effect" here, 0 everywhere else.
_ONES = [_F["top_p"], _F["repetition_penalty"]]


@dataclass(frozen=True, kw_only=True)
class PackedSampling:
    """What a step sends to the device. Fresh arrays each time: the runtime may alias them.

    Attributes:
        rows: int32 [len(ROW_FIELDS), B].
        bias: int32 [2, B, MAX_LOGIT_BIAS], ids and float bits; None if no row has a bias.
        allowed: uint32 [B, ceil(V / 32)]; None if every row may produce every token.
    """

    rows: np.ndarray
    bias: np.ndarray | None
    allowed: np.ndarray | None


def unpack_sampling(rows: Array, bias: Array, allowed: Array) -> SamplingInputs:
    """Return the device's view of a `PackedSampling`; runs inside the jitted step."""
    floats = {name: lax.bitcast_convert_type(rows[_F[name]], jnp.float32) for name in FLOAT_FIELDS}
    words = lax.bitcast_convert_type(rows, jnp.uint32)
    flags = rows[_F["flags"]]
    return SamplingInputs(
        **floats,
        top_k=rows[_F["top_k"]],
        seeds=jnp.stack([words[_F["seed_high"]], words[_F["seed_low"]]], axis=-1),
        positions=rows[_F["position"]],
        prompt_lens=rows[_F["prompt_len"]],
        wants_logprobs=(flags & WANTS_LOGPROBS) != 0,
        has_bias=(flags & HAS_BIAS) != 0,
        has_mask=(flags & HAS_MASK) != 0,
        bias_ids=bias[0],
        bias_values=lax.bitcast_convert_type(bias[1], jnp.float32),
        allowed=allowed,
    )


def neutral_bias(bucket: int, vocab_size: int) -> np.ndarray:
    """Return the `bias` of a step in which no row has one: int32 [2, bucket, MAX_LOGIT_BIAS]."""
    bias = np.zeros((2, bucket, MAX_LOGIT_BIAS), np.int32)
    bias[0] = vocab_size
    return bias


def neutral_mask(bucket: int, vocab_size: int) -> np.ndarray:
    """Return the `allowed` that forbids nothing: uint32 [bucket, ceil(vocab_size / 32)]."""
    return np.full((bucket, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)


def child_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of sample `index` of a request; sample 0 has the request's own."""
    if index == 0:
        return seed
    message = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")


class SamplingPacker:
    """Packs the sampling parameters of a step, remembering what never changes about a request."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._prepared: dict[str, _Prepared] = {}
        # Row i holds the columns of the request whose index is i.
        self._columns = np.zeros((8, len(ROW_FIELDS)), np.int32)
        self._free = list(range(8))
        self._requests: list[Request] | None = None  # of the last call
        self._last: list[_Prepared] = []
        self._edited: list[int] = []
        self._indices = np.zeros(0, np.int64)

    def pack(
        self,
        rows: Sequence[ScheduledRow],
        bucket: int,
        *,
        extra_masks: Mapping[str, np.ndarray] | None = None,
    ) -> PackedSampling:
        """Pack the sampling rows of a plan, padded to `bucket` with greedy rows.

        Args:
            rows: `StepPlan.sampling_rows`; row i of every array is `rows[i]`.
            bucket: `B`, at least `len(rows)`.
            extra_masks: request_id → uint32 [ceil(V / 32)], allowed ids on top of the request's own
                (structured output).

        Raises:
            ValueError: More rows than `bucket`.
        """
        if len(rows) > bucket:
            raise ValueError(f"{len(rows)} sampling rows do not fit a bucket of {bucket}")
        requests = [row.request for row in rows]
        # In most steps the rows are those of the step before.
        if requests != self._requests:
            self._last = [self._prepare(request) for request in requests]
            self._requests = requests
            self._indices = np.array([prepared.index for prepared in self._last], np.int64)
            self._edited = [i for i, prepared in enumerate(self._last) if not prepared.is_plain]
        packed = np.zeros((len(ROW_FIELDS), bucket), np.int32)
        packed[:, : len(rows)] = self._columns[self._indices].T
        packed[_F["position"], : len(rows)] = [row.start + row.num_scheduled_tokens for row in rows]
        packed[_ONES, len(rows) :] = np.float32(1).view(np.int32)
        bias = allowed = None
        for i in range(len(rows)) if extra_masks else self._edited:
            row, prepared = rows[i], self._last[i]
            if prepared.bias is not None:
                bias = neutral_bias(bucket, self.vocab_size) if bias is None else bias
                bias[:, i] = prepared.bias
            mask = _and(prepared.mask(row), (extra_masks or {}).get(row.request.request_id))
            if mask is not None:
                allowed = neutral_mask(bucket, self.vocab_size) if allowed is None else allowed
                allowed[i] = mask
                packed[_F["flags"], i] |= HAS_MASK
        return PackedSampling(rows=packed, bias=bias, allowed=allowed)

    def pack_limits(self, rows: Sequence[ScheduledRow], bucket: int) -> np.ndarray:
        """Return int32 [1 + MAX_STOP_IDS, bucket]: what ends each row within several decode steps.

        Its number of steps, none for padding, and its end tokens, filled up with -1.
        """
        packed = np.full((1 + MAX_STOP_IDS, bucket), -1, np.int32)
        packed[0] = 0
        for i, row in enumerate(rows):
            packed[0, i] = row.num_steps
            packed[1:, i] = self._prepare(row.request).ends
        return packed

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a finished request; unknown ids are fine."""
        prepared = self._prepared.pop(request_id, None)
        if prepared is not None:
            self._free.append(prepared.index)
            self._requests, self._last = None, []

    def _prepare(self, request: Request) -> _Prepared:
        prepared = self._prepared.get(request.request_id)
        # Ids may be used again; the object tells whether it is the same request.
        if prepared is None or prepared.request is not request:
            self.forget(request.request_id)
            if not self._free:
                num_rows = len(self._columns)
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
                self._free = list(range(num_rows, 2 * num_rows))
            prepared = _Prepared.of(request, self.vocab_size, self._free.pop())
            self._columns[prepared.index] = _column(request)
            self._prepared[request.request_id] = prepared
        return prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """What is constant about a request, in packed form.

    Attributes:
        index: Where the packer keeps its column of the blob.
        is_plain: Whether there is nothing but the column.
        bias: int32 [2, MAX_LOGIT_BIAS], or None.
        base: Allowed ids at any time, uint32 [ceil(V / 32)]; None for all.
        early: `base` without the tokens that end the output, for outputs below `min_tokens`.
        phrases: Forbidden sequences of two tokens and more.
        ends: int32 [MAX_STOP_IDS], for `SamplingPacker.pack_limits`.
    """

    request: Request
    vocab_size: int
    index: int
    is_plain: bool
    bias: np.ndarray | None
    base: np.ndarray | None
    early: np.ndarray | None
    phrases: tuple[tuple[int, ...], ...]
    ends: np.ndarray

    @classmethod
    def of(cls, request: Request, vocab_size: int, index: int) -> _Prepared:
        params = request.params
        base = None
        if params.allowed_token_ids is not None:
            base = _bits(params.allowed_token_ids, vocab_size)
        words = [tuple(word) for word in params.bad_words_token_ids or ()]
        base = _ban(base, [word[0] for word in words if len(word) == 1], vocab_size)
        ends = request.eos_token_ids.union(params.stop_token_ids or ())
        return cls(
            request=request,
            vocab_size=vocab_size,
            index=index,
            is_plain=not (params.logit_bias or words or params.min_tokens) and base is None,
            bias=_bias(params.logit_bias, vocab_size) if params.logit_bias else None,
            base=base,
            early=_ban(base, ends if params.min_tokens else (), vocab_size),
            phrases=tuple(word for word in words if len(word) > 1),
            ends=_ends(ends),
        )

    def mask(self, row: ScheduledRow) -> np.ndarray | None:
        """Return the ids allowed for the token at `row.end`, None for all."""
        request = self.request
        num_output_tokens = row.end - request.num_prompt_tokens  # counts those in flight
        mask = self.early if num_output_tokens < request.params.min_tokens else self.base
        if not self.phrases:
            return mask
        assert request.num_tokens == row.end, (
            f"bad_words of several tokens: the token before position {row.end} must be on the host"
        )
        tail = tuple(request.token_ids[-max(map(len, self.phrases)) :])
        banned = [words[-1] for words in self.phrases if tail[1 - len(words) :] == words[:-1]]
        return _ban(mask, banned, self.vocab_size)


def _column(request: Request) -> np.ndarray:
    """Return a request's column of the blob, int32 [len(ROW_FIELDS)], all but the position."""
    params = request.params
    draws = params.temperature >= MIN_TEMPERATURE and params.top_k != 1
    floats = {
        "temperature": min(params.temperature, MAX_FACTOR) if draws else 0.0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": min(max(params.repetition_penalty, 1 / MAX_FACTOR), MAX_FACTOR),
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }
    seed = request.seed % 2**64
    ints = {
        "top_k": params.top_k,
        "seed_high": seed >> 32,
        "seed_low": seed & 0xFFFFFFFF,
        "position": 0,
        "prompt_len": request.num_prompt_tokens,
        "flags": (WANTS_LOGPROBS if params.logprobs is not None else 0)
        | (HAS_BIAS if params.logit_bias else 0),
    }
    return np.concatenate(
        [
            np.array([floats[name] for name in FLOAT_FIELDS], np.float32).view(np.int32),
            # -1, "all", wraps and unwraps like any other word.
            np.array([ints[name] % 2**32 for name in INT_FIELDS], np.uint32).view(np.int32),
        ]
    )


def _bias(logit_bias: Mapping[int, float], vocab_size: int) -> np.ndarray:
    bias = neutral_bias(1, vocab_size)[:, 0]
    bias[0, : len(logit_bias)] = list(logit_bias)
    bias[1, : len(logit_bias)] = np.array(list(logit_bias.values()), np.float32).view(np.int32)
    return bias


def _ends(token_ids: Iterable[int]) -> np.ndarray:
    known = sorted(token_ids)[:MAX_STOP_IDS]
    ends = np.full(MAX_STOP_IDS, -1, np.int32)
    ends[: len(known)] = known
    return ends


def _bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return a packed bitmask with the given tokens set, uint32 [ceil(V / 32)]."""
    # End tokens come from the model's config and may lie outside its vocabulary.
    ids = np.array([i for i in token_ids if i < vocab_size], np.int64)
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words


def _ban(mask: np.ndarray | None, token_ids: Iterable[int], vocab_size: int) -> np.ndarray | None:
    """Return `mask` (None: all ids) without the given ones; `mask` itself if there are none."""
    bits = _bits(token_ids, vocab_size)
    if not bits.any():
        return mask
    return ~bits if mask is None else mask & ~bits


def _and(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b
