"""A process that follows: makes the device calls that the leader makes, in the same order."""

from __future__ import annotations

from jaxinfer.hosts.channel import STOP, Follower
from jaxinfer.hosts.messages import Message
from jaxinfer.model_runner import Hidden, ModelRunner
from jaxinfer.sampling_batch import PackedSampling


def replay(runner: ModelRunner, channel: Follower) -> None:
    """Make calls until the leader says that it is over."""
    channel.expect_pings()
    hidden: Hidden | None = None
    while (message := channel.next()).word != STOP:
        hidden = call(runner, message, hidden)
        channel.answer()


def call(runner: ModelRunner, message: Message, hidden: Hidden | None) -> Hidden | None:
    """Make the call of a message; return the hidden states that later calls are about."""
    number, arrays = message.number, message.arrays
    match message.word:
        case "backbone":
            return runner.call_backbone(number, *arrays)  # pyrefly: ignore[bad-argument-type]
        case "decode":
            packed, limits, rows, bias, allowed = arrays
            assert packed is not None and limits is not None and rows is not None
            sampling = PackedSampling(rows=rows, bias=bias, allowed=allowed)
            runner.call_decode(number, packed, limits, sampling)
            return hidden
    assert hidden is not None, f"{message.word} comes after a backbone"
    match message.word:
        case "sampler":
            rows, bias, allowed, page_table = arrays
            assert rows is not None
            sampling = PackedSampling(rows=rows, bias=bias, allowed=allowed)
            runner.call_sampler(number, hidden.sampled, sampling, page_table)
        case "score":
            indices, token_ids = arrays
            assert indices is not None and token_ids is not None
            runner.call_score(number, hidden.tokens, indices, token_ids)
        case "pool":
            (slots,) = arrays
            assert slots is not None
            runner.call_pool(number, hidden.tokens, slots)
        case _:
            raise AssertionError(f"unknown message {message.word!r}: versions differ")
    return hidden
