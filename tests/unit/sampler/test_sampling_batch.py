"""The host's packing: what reaches the device for a request, and when the wide parts are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.sampling_batch import (
    SamplingPacker,
    child_seed,
    neutral_bias,
    neutral_mask,
    unpack_sampling,
)
from jaxinfer.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from tests.unit.sampler.harness import Row

V = 70


def row(output: tuple[int, ...] = (), ends: tuple[int, ...] = (), **params: Any) -> Row:
    return Row(
        logits=np.zeros(V),
        params=SamplingParams(max_tokens=None, **params),
        prompt=(1, 2, 3),
        output=output,
        ends=ends,
    )


def banned(r: Row, packer: SamplingPacker | None = None) -> set[int]:
    """The ids that a row's mask forbids."""
    packed = (packer or SamplingPacker(V)).pack([r.scheduled()], 2)
    if packed.allowed is None:
        return set()
    assert packed.allowed.dtype == np.uint32
    assert packed.allowed.shape == (2, 3)
    bits = (packed.allowed[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    bits = bits.reshape(2, -1)[:, :V]
    assert bits[1].all()  # the padding row
    return set(np.flatnonzero(bits[0] == 0).tolist())


def test_fields_survive_the_blob() -> None:
    r = Row(
        logits=np.zeros(V),
        params=SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=-1,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=-1.5,
            frequency_penalty=0.25,
            logit_bias={69: -7.5, 2: 3.0},
            logprobs=0,
        ),
        seed=-2,
        prompt=(1, 2, 3),
        output=(4, 5),
    )
    packed = SamplingPacker(V).pack([r.scheduled()], 2)
    assert packed.bias is not None
    inputs = unpack_sampling(packed.rows, packed.bias, neutral_mask(2, V))
    f32 = np.float32
    assert inputs.temperature.tolist() == [f32(0.7), 0]
    assert inputs.top_p.tolist() == [f32(0.9), 1]
    assert inputs.top_k.tolist() == [-1, 0]
    assert inputs.min_p.tolist() == [f32(0.1), 0]
    assert inputs.repetition_penalty.tolist() == [f32(1.1), 1]
    assert inputs.presence_penalty.tolist() == [-1.5, 0]
    assert inputs.frequency_penalty.tolist() == [0.25, 0]
    assert inputs.seeds[0].tolist() == [2**32 - 1, 2**32 - 2]
    assert inputs.positions.tolist() == [5, 0]
    assert inputs.prompt_lens.tolist() == [3, 0]
    assert inputs.wants_logprobs.tolist() == [True, False]
    assert inputs.has_bias.tolist() == [True, False]
    assert inputs.has_mask.tolist() == [False, False]
    assert inputs.sampled.tolist() == [True, False]
    assert inputs.penalised.tolist() == [True, False]
    assert inputs.bias_ids.shape == (2, MAX_LOGIT_BIAS)
    assert inputs.bias_ids[0, :3].tolist() == [69, 2, V]
    assert inputs.bias_values[0, :3].tolist() == [-7.5, 3.0, 0.0]
    assert set(inputs.bias_ids[1].tolist()) == {V}


def test_wide_parts_are_sent_only_when_a_row_uses_them() -> None:
    packer = SamplingPacker(V)
    packed = packer.pack([row().scheduled("a")], 4)
    assert packed.bias is None
    assert packed.allowed is None
    packed = packer.pack([row().scheduled("b"), row(logit_bias={1: 1.0}).scheduled("c")], 4)
    assert packed.bias is not None
    assert packed.bias.shape == neutral_bias(4, V).shape
    assert packed.allowed is None


def test_allowed_and_bad_words_intersect() -> None:
    r = row(allowed_token_ids=(0, 31, 32, 69), bad_words_token_ids=((31,), (40,)))
    assert banned(r) == set(range(V)) - {0, 32, 69}


def test_end_tokens_are_banned_until_min_tokens() -> None:
    packer = SamplingPacker(V)
    params: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (9,), "ends": (5, 69, 1000)}
    scheduled = row(**params).scheduled()
    bans = []
    for length in range(4):
        packed = packer.pack([scheduled], 1)
        bans.append(packed.allowed is not None)
        scheduled.request.token_ids.append(length)
        scheduled = type(scheduled)(
            request=scheduled.request,
            start=scheduled.start + 1,
            num_scheduled_tokens=1,
            samples=True,
            epoch=0,
        )
    assert bans == [True, True, False, False]
    # 1000 lies outside the vocabulary, as the end token of a config may.
    assert banned(row(**params)) == {5, 9, 69}


def test_min_tokens_counts_tokens_still_in_flight() -> None:
    r = row(min_tokens=2, ends=(5,), output=(8, 8))
    scheduled = r.scheduled()
    scheduled.request.token_ids.pop()  # sampled, not fetched
    assert SamplingPacker(V).pack([scheduled], 1).allowed is None


def test_min_tokens_holds_under_an_allowed_set() -> None:
    assert banned(row(min_tokens=1, ends=(5,), allowed_token_ids=(5, 6))) == set(range(V)) - {6}


@pytest.mark.parametrize(
    ("output", "want"),
    [((), {7}), ((4,), {7, 5}), ((4, 5), {7, 6}), ((9, 4), {7, 5}), ((5,), {7})],
)
def test_phrases_ban_their_last_token_after_the_rest(
    output: tuple[int, ...], want: set[int]
) -> None:
    words = ((7,), (4, 5), (4, 5, 6), (2, 2, 2, 2, 2, 2, 2, 2))
    assert banned(row(output=output, bad_words_token_ids=words)) == want


def test_a_phrase_may_begin_in_the_prompt() -> None:
    assert banned(row(bad_words_token_ids=((2, 3, 8), (3, 3, 9)))) == {8}


def test_phrases_need_their_tokens_on_the_host() -> None:
    assert SamplingParams(bad_words_token_ids=((1,), (1, 2))).needs_host_tokens
    assert not SamplingParams(bad_words_token_ids=((1,),)).needs_host_tokens
    scheduled = row(output=(4,), bad_words_token_ids=((4, 5),)).scheduled()
    scheduled.request.token_ids.pop()
    with pytest.raises(AssertionError, match="must be on the host"):
        SamplingPacker(V).pack([scheduled], 1)


def test_extra_masks_narrow_what_a_request_allows() -> None:
    packer = SamplingPacker(V)
    extra = np.array([0b1101, 0, 0], np.uint32)
    rows = [
        row().scheduled("a"),
        row(allowed_token_ids=(1, 2)).scheduled("b"),
        row().scheduled("c"),
    ]
    packed = packer.pack(rows, 4, extra_masks={"a": extra, "b": extra})
    assert packed.allowed is not None
    assert packed.allowed[:, 0].tolist() == [0b1101, 0b0100, 2**32 - 1, 2**32 - 1]
    inputs = unpack_sampling(packed.rows, neutral_bias(4, V), packed.allowed)
    assert inputs.has_mask.tolist() == [True, True, False, False]


def test_each_step_gets_fresh_buffers() -> None:
    packer = SamplingPacker(V)
    scheduled = row(logit_bias={1: 1.0}, allowed_token_ids=(1, 2)).scheduled()
    first, second = packer.pack([scheduled], 2), packer.pack([scheduled], 2)
    for name in ("rows", "bias", "allowed"):
        a, b = getattr(first, name), getattr(second, name)
        np.testing.assert_array_equal(a, b)
        assert not np.shares_memory(a, b)
        a.fill(77)  # nor does the packer keep it
    third = packer.pack([scheduled], 2)
    np.testing.assert_array_equal(third.rows, second.rows)
    np.testing.assert_array_equal(third.allowed, second.allowed)


def test_a_reused_request_id_is_a_new_request() -> None:
    packer = SamplingPacker(V)
    assert banned(row(bad_words_token_ids=((7,),)), packer) == {7}
    assert banned(row(bad_words_token_ids=((8,),)), packer) == {8}


def test_forgotten_requests_leave_nothing_behind() -> None:
    packer = SamplingPacker(V)
    for i in range(20):
        packer.pack([row(allowed_token_ids=(1,)).scheduled(str(i))], 1)
        packer.forget(str(i))
    packer.forget("never seen")
    assert not packer._prepared


def test_more_rows_than_the_bucket_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sampling rows do not fit a bucket of 1"):
        SamplingPacker(V).pack([row().scheduled("a"), row().scheduled("b")], 1)


@given(seed=st.integers(-(2**63), 2**64 - 1), n=st.integers(1, 128))
def test_child_seeds_are_distinct_and_begin_with_the_seed(seed: int, n: int) -> None:
    seeds = [child_seed(seed, i) for i in range(n)]
    assert seeds[0] == seed
    assert len(set(seeds)) == n
    assert all(0 <= s < 2**64 for s in seeds[1:])
    assert seeds[1:] == [child_seed(seed % 2**64, i) for i in range(1, n)]


def test_child_seeds_never_change() -> None:
    """Results are reproducible across releases only while this holds."""
    assert child_seed(0, 1) == 8118103383084794603
