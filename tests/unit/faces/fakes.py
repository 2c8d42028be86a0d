"""A byte tokenizer and an engine in pure Python, for the faces: no jax, no weights, no clock.

`FakeEngine` has the methods of `jaxinfer.engine.Engine`. A token is a function of seed, prompt and
position, so equal requests give equal tokens whatever runs beside them; a `script` in place of a
drawn output makes the text known. Errors come on command.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.errors import InvalidRequestError, QueueFullError
from jaxinfer.metrics import EngineStats
from jaxinfer.request import FinishReason, TokenLogprobs, TokenOutput
from jaxinfer.sampling_params import SamplingParams

EOS = 256
VOCAB_SIZE = 260


class ByteTokenizer:
    """Token i < 256 is byte i; 256 is the end of sequence and special."""

    vocab_size = VOCAB_SIZE
    bos_token_id = None
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset(range(256, VOCAB_SIZE))
    has_chat_template = True
    strips_leading_space = False

    def __init__(self) -> None:
        self.encoding_threads: set[str] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoding_threads.add(threading.current_thread().name)
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>"

    def encode_bad_word(self, word: str) -> list[list[int]]:
        return [list(word.encode()), list(f" {word}".encode())]

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        **kwargs: Any,
    ) -> str:
        if not messages or any(
            m.get("role") not in ("system", "user", "assistant") for m in messages
        ):
            raise InvalidRequestError("messages: unknown role", "messages")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return (
            text
            + "".join(f"{k}={v}\n" for k, v in kwargs.items())
            + "assistant: " * add_generation_prompt
        )


@dataclass
class _Running:
    prompt: list[int]
    params: SamplingParams
    seed: int
    tokens: list[int] = field(default_factory=list)
    admitted: bool = False


class FakeEngine:
    """Gives every request one token a step, up to `max_num_seqs` requests a step.

    Args:
        script: Text or token ids that every request produces, in place of drawn tokens.
        tokens_per_step: How many tokens a request gets in one step.
        order: Rearranges a step's outputs.
        on_step: Called before each step, with the step's number; may raise.
    """

    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        *,
        script: str | Sequence[int] | None = None,
        max_model_len: int = 1000,
        max_num_seqs: int = 10_000,
        max_waiting: int | None = None,
        num_pages: int = 10_000,
        tokens_per_step: int = 1,
        order: Callable[[list[TokenOutput]], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ):
        self.script = list(script.encode()) if isinstance(script, str) else script
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_waiting = max_waiting
        self.num_pages = num_pages
        self.tokens_per_step = tokens_per_step
        self.order = order or (lambda outputs: None)
        self.on_step = on_step or (lambda number: None)
        self.stats = EngineStats()
        self.live: dict[str, _Running] = {}
        self.added: list[str] = []
        self.aborted: list[tuple[str, FinishReason]] = []
        self.num_checks = 0
        self.closed = False
        self.corrupt = False
        self.threads: set[str] = set()
        self.fail_next: set[str] = set()  # these end with an error at the next step

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float | None = None,
    ) -> None:
        self._note_thread()
        assert request_id not in self.live and params.n == 1 and seed is not None
        assert params.max_tokens is not None and not params.bad_words
        if len(prompt_token_ids) > self.num_pages:
            raise InvalidRequestError("the prompt can never fit", "prompt")
        if self.max_waiting is not None:
            waiting = sum(not r.admitted for r in self.live.values())
            if waiting >= self.max_waiting:
                raise QueueFullError(f"{waiting} requests wait")
        self.live[request_id] = _Running(list(prompt_token_ids), params, seed)
        self.added.append(request_id)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self._note_thread()
        if self.live.pop(request_id, None) is not None:
            self.aborted.append((request_id, reason))

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def close(self) -> None:
        self.closed = True

    def check_integrity(self) -> None:
        self._note_thread()
        self.num_checks += 1
        if self.corrupt:
            raise AssertionError("page 7 has two owners")

    def step(self) -> list[TokenOutput]:
        self._note_thread()
        self.on_step(self.stats.num_steps)
        self.stats.num_steps += 1
        outputs = [self._advance(name) for name in list(self.live)[: self.max_num_seqs]]
        self.order(outputs)
        return outputs

    def _advance(self, name: str) -> TokenOutput:
        request = self.live[name]
        params = request.params
        first, request.admitted = not request.tokens, True
        if name in self.fail_next:
            del self.live[name]
            return TokenOutput(
                request_id=name, finish_reason=FinishReason.ERROR, error="logits held a NaN"
            )
        new: list[int] = []
        reason, stop_reason = None, None
        while reason is None and len(new) < self.tokens_per_step:
            token = self._token(request)
            new.append(token)
            request.tokens.append(token)
            if token == EOS and not params.ignore_eos:
                reason = FinishReason.STOP
            elif token in params.stop_token_ids:
                reason, stop_reason = FinishReason.STOP, token
            elif len(request.tokens) >= params.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            del self.live[name]
        with_prompt = first and params.prompt_logprobs is not None
        return TokenOutput(
            request_id=name,
            new_token_ids=tuple(new),
            logprobs=None
            if params.logprobs is None
            else tuple(_logprobs(token, params.logprobs) for token in new),
            prompt_logprobs=(
                None,
                *(_logprobs(token, params.prompt_logprobs) for token in request.prompt[1:]),
            )
            if with_prompt
            else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=3,
            first_scheduled_time=0.0,
        )

    def _token(self, request: _Running) -> int:
        position = len(request.tokens)
        if self.script is not None:
            return self.script[position] if position < len(self.script) else EOS
        text = f"{0 if request.params.greedy else request.seed} {request.prompt} {position}"
        return 97 + hashlib.sha256(text.encode()).digest()[0] % 26

    def _note_thread(self) -> None:
        self.threads.add(threading.current_thread().name)


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    """The sampled token ranks second; the likeliest are its neighbours below, itself included."""
    top = tuple((token + 1 - i) % 256 for i in range(num_top))
    return TokenLogprobs(
        logprob=-0.5,
        rank=2,
        top_token_ids=top,
        top_logprobs=tuple(-0.25 * (i + 1) for i in range(num_top)),
    )


def loaded(engine: FakeEngine, *, generation_config: dict | None = None, **settings: Any) -> Any:
    """What `jaxinfer.loading.load` returns, around a fake engine."""
    return SimpleNamespace(
        engine=engine,
        tokenizer=ByteTokenizer(),
        config=EngineConfig(**settings),
        model_config=None,
        name="fake",
        generation_config=generation_config or {},
    )
