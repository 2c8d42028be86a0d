"""A client that loads any OpenAI-compatible server with streamed completions, and keeps the times.

Open loop: requests arrive at times of their own (Poisson), however slow the server is. Closed loop:
so many at once, a new one when one has ended. Times are those that a client sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from jaxinfer.bench.workload import Workload, poisson_arrivals
from jaxinfer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server.

    Attributes:
        url: Its root, as "http://127.0.0.1:8000"; a "/v1" behind it is understood.
        model: What it calls its model; None asks it.
        api_key: Sent as a bearer token.
        extra_body: Further fields of each request.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The URL without a trailing "/" or "/v1"."""
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(kw_only=True)
class Call:
    """What became of one request; seconds since the start of the run.

    Attributes:
        sent: When it was sent.
        chunks: When each chunk with a token came.
        num_tokens: As the server counts them, else the chunks.
        error: Why there is no answer; None if there is one.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0] - self.sent

    @property
    def e2e_s(self) -> float:
        """Seconds to the last token."""
        return self.chunks[-1] - self.sent

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first; 0 if there is only one."""
        return (self.chunks[-1] - self.chunks[0]) / max(self.num_tokens - 1, 1)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between chunks, which may carry several tokens."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


def load_server(
    target: Target,
    work: Workload,
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    text_prompts: bool = False,
    timeout_s: float = 600.0,
) -> tuple[list[Call], float]:
    """Send a workload, and return what became of each request, and how long all took.

    Args:
        target: The server.
        work: The requests.
        concurrency: Most requests at once (closed loop); None for no limit.
        rate: Requests a second on average (open loop); None for all at once.
        text_prompts: Send words instead of token ids, for servers that take no ids: then a prompt
            has about so many tokens.
        timeout_s: Of one request.

    Raises:
        ConfigError: The server does not answer.
    """
    run = _load(target, work, concurrency, rate, text_prompts, timeout_s)
    return asyncio.run(run)


async def _load(
    target: Target,
    work: Workload,
    concurrency: int | None,
    rate: float | None,
    text_prompts: bool,
    timeout_s: float,
) -> tuple[list[Call], float]:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=target.root, headers=headers, limits=limits, timeout=timeout_s, trust_env=False
    ) as http:
        model = target.model or await _model_of(http)
        prompts = work.prompts()
        bodies = [
            {
                "model": model,
                "prompt": _as_text(prompt) if text_prompts else prompt,
                "max_tokens": work.new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **target.extra_body,
            }
            for prompt in prompts
        ]
        arrivals: Sequence[float] = [0.0] * len(bodies)
        if rate is not None:
            arrivals = poisson_arrivals(len(bodies), rate, work.seed)
        seats = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
        start = time.perf_counter()

        async def send(body: dict[str, Any], arrival: float) -> Call:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            async with seats:
                return await _call(http, body, start)

        calls = await asyncio.gather(*map(send, bodies, arrivals))
        return list(calls), time.perf_counter() - start


async def _model_of(http: httpx.AsyncClient) -> str:
    try:
        answer = await http.get("/v1/models")
        return answer.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{http.base_url}: expected an OpenAI-compatible server with a model, got {error!r}"
        ) from error


async def _call(http: httpx.AsyncClient, body: dict[str, Any], start: float) -> Call:
    call = Call(sent=time.perf_counter() - start)
    counted = None
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                call.error = f"{answer.status_code} {text[:300]}"
                return call
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data in ("", "[DONE]"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    call.error = json.dumps(event["error"])[:300]
                    return call
                usage = event.get("usage") or {}
                counted = usage.get("completion_tokens", counted)
                if any(map(_has_token, event.get("choices") or ())):
                    call.chunks.append(time.perf_counter() - start)
    except (httpx.HTTPError, ValueError) as error:
        call.error = f"{type(error).__name__}: {error}"
        return call
    if not call.chunks:
        call.error = "the stream held no token"
    call.num_tokens = len(call.chunks) if counted is None else counted
    return call


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a chunk stands for a token: half a character has no text yet."""
    text = choice.get("text")
    return bool(text) or (text == "" and not choice.get("finish_reason"))


_WORDS = ("time", "year", "people", "way", "day", "thing", "world", "life", "hand", "part", "child")


def _as_text(token_ids: Sequence[int]) -> str:
    return " ".join(_WORDS[i % len(_WORDS)] for i in token_ids)
