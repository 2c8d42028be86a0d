"""A model that recites, for the real engine, scheduler, page pool and `AsyncEngine` to run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxinfer.batch import StepPlan, StepResult
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequestError
from jaxinfer.request import Pooling, Request, TokenLogprobs
from jaxinfer.sampling_params import SamplingParams

BOS, EOS = 256, 257
VOCAB_SIZE = 260
NAME = "tiny"
# Characters of one to four bytes: each byte is a token, so most tokens end inside a character.
REPLY = "Grüße, Wörld! 🌍🚀 日本語 ok."
# A prompt that holds this token gets logits that are not numbers.
POISON = 259


class ByteTokenizer:
    """Token i < 256 is byte i; the others are special."""

    vocab_size = VOCAB_SIZE
    bos_token_id = BOS
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset(range(256, VOCAB_SIZE))
    has_chat_template = True
    strips_leading_space = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_bad_word(self, word: str) -> list[list[int]]:
        return [list(word.encode())]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i >= 256))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<%d>" % token_id

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        if chat_template is not None:
            return chat_template
        if "fail" in kwargs:
            raise InvalidRequestError("The chat template failed: no", "messages")
        turns = [f"{m['role']}: {m['content']}" for m in messages]
        tail = "\nassistant: " if add_generation_prompt else "" if continue_final_message else "\n"
        return "".join(f"{k}={v}\n" for k, v in kwargs.items()) + "\n".join(turns) + tail


class RecitingRunner:
    """Stands in for `ModelRunner`: every request recites `reply`, then ends.

    Attributes:
        reply: What is recited; a request that draws starts at an offset that its seed sets.
        step_s: How long a step takes.
        error: If set, the next step raises it.
        requests: All that ever ran, by id.
    """

    num_programs = 0
    windows = ()
    num_programs_pending = 0

    def __init__(self, reply: str = REPLY):
        self.reply = reply.encode()
        self.step_s = 0.0
        self.error: Exception | None = None
        self.requests: dict[str, Request] = {}
        self._clock = threading.Event()

    def forward(self, plan: StepPlan) -> StepPlan:
        if self.error is not None:
            raise self.error
        if self.step_s:
            self._clock.wait(self.step_s)  # never set: the time that a device would take
        for row in plan.rows:
            self.requests[row.request.request_id] = row.request
        return plan

    def sample(self, plan: StepPlan, hidden: StepPlan) -> StepResult:
        rows = plan.sampling_rows
        tokens = [self._token(row.request, row.end) for row in rows]
        corrupted = tuple(POISON in row.request.prompt_token_ids for row in rows)
        return StepResult(
            token_ids=tuple(
                () if bad else (token,) for token, bad in zip(tokens, corrupted, strict=True)
            ),
            corrupted=corrupted,
            logprobs=tuple(
                None if entry is None else (entry,)
                for entry in (
                    _logprobs(token, row.request.params)
                    for row, token in zip(rows, tokens, strict=True)
                )
            ),
            prompt_logprobs=dict(filter(None, map(_prompt_logprobs, plan.rows))),
            pooled={
                row.request.request_id: vector_part(row.request, row.start, row.end)
                for row in plan.rows
                if row.request.pooling is not None
            },
        )

    def fetch(self, plan: StepPlan, step: StepResult) -> StepResult:
        return step

    def forget(self, request_id: str) -> None:
        pass

    def max_decode_steps(self, num_rows: int) -> int:
        return 1

    def close(self) -> None:
        pass

    def _token(self, request: Request, position: int) -> int:
        index = position - request.num_prompt_tokens
        if request.params.ignore_eos:
            return self.reply[index % len(self.reply)]
        if not request.params.greedy:
            index += request.seed % 8
        return self.reply[index] if index < len(self.reply) else EOS


def vector_part(request: Request, start: int, end: int) -> np.ndarray:
    """What the tokens [start, end) add to a prompt's vector: a hidden state is a token's digits."""
    first = start if request.pooling is Pooling.MEAN else request.num_prompt_tokens - 1
    states = hidden_states(list(request.prompt_token_ids[first:end]))
    return states.sum(axis=0, dtype=np.float32)


def hidden_states(token_ids: Sequence[int]) -> np.ndarray:
    """Return float32 [T, 4]: what this model makes of tokens."""
    t = np.asarray(token_ids, np.int32)
    return np.stack([1 + t % 4, t // 4 % 4, t // 16 % 4, t // 64], axis=-1).astype(np.float32)


def _logprobs(token: int, params: SamplingParams) -> TokenLogprobs | None:
    """The token that stands there is the second likeliest; the last alternative is impossible."""
    num_top = params.logprobs
    if num_top is None:
        return None
    return _of_token(token, num_top, [(-2.0 - i, 100) for i in params.logprob_token_ids or ()])


def _of_token(token: int, num_top: int, asked: Sequence[tuple[float, int]] = ()) -> TokenLogprobs:
    top = ((token + 1) % 256, token, (token + 2) % 256)[:num_top]
    values = (-0.25, -0.5, -float("inf"))[:num_top]
    return TokenLogprobs(
        logprob=-0.5, rank=2, top_token_ids=top, top_logprobs=values, asked=tuple(asked)
    )


def _prompt_logprobs(row: Any) -> tuple[str, tuple[TokenLogprobs, ...]] | None:
    request = row.request
    num_top = request.params.prompt_logprobs
    positions = range(row.start + 1, min(row.end + 1, request.num_prompt_tokens))
    if num_top is None or not positions:
        return None
    entries = tuple(_of_token(request.prompt_token_ids[i], num_top) for i in positions)
    return request.request_id, entries


def make_loaded(
    runner: RecitingRunner | None = None,
    *,
    generation_config: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """What `jaxinfer.loading.load` returns, around a reciting model."""
    small = {
        "max_model_len": 512,
        "page_size": 16,
        "num_pages": 2048,
        "max_num_batched_tokens": 256,
    }
    config = EngineConfig(**{**small, **settings})
    engine = Engine(
        config,
        runner or RecitingRunner(),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
    )
    return SimpleNamespace(
        engine=engine,
        tokenizer=ByteTokenizer(),
        config=config,
        model_config=None,
        name=NAME,
        generation_config=generation_config or {},
    )
