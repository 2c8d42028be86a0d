"""One API request between its JSON and its answer: what the two generating endpoints share."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.types import Receive

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.errors import UnknownModelError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.logprobs import LogprobFormatter
from jaxinfer.server.metrics import ServerMetrics
from jaxinfer.server.prompt_batch import EncodedPrompt, PromptBatch
from jaxinfer.server.protocol import REQUEST_ID, RequestFields


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is loaded and warm.

    Attributes:
        name: In the API.
        engine: Runs it.
        generation_config: Its makers' sampling defaults.
        fingerprint: Equal for servers whose answers to a seeded request are equal.
        created: Unix seconds when it became ready.
    """

    name: str
    engine: AsyncEngine
    generation_config: Mapping[str, Any]
    fingerprint: str
    created: int

    def check_name(self, name: str | None) -> None:
        """Raise `UnknownModelError` unless this model, or none in particular, is asked for."""
        if name is not None and name != self.name:
            raise UnknownModelError(
                f"The model {name[:200]!r} does not exist; this server has {self.name!r}", "model"
            )


@dataclass(kw_only=True)
class Call[B: RequestFields]:
    """One request of one endpoint.

    Attributes:
        body: What was asked.
        model: Who answers.
        metrics: Counts it.
        receive: Tells when the client leaves.
        request_id: The client's or a made-up one.
        created: Unix seconds, in the answer and each chunk.
    """

    body: B
    model: ServedModel
    metrics: ServerMetrics
    receive: Receive
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))

    id_prefix: ClassVar[str]

    @property
    def engine(self) -> AsyncEngine:
        return self.model.engine

    @property
    def response_id(self) -> str:
        return f"{self.id_prefix}-{self.request_id}"

    @property
    def envelope(self) -> dict[str, Any]:
        """Return the fields that an answer and all chunks of a stream have in common."""
        return {
            "id": self.response_id,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def formatter(self, num_top: int | None) -> LogprobFormatter:
        return LogprobFormatter(
            self.engine.tokenizer,
            num_top=num_top or 0,
            as_token_ids=bool(self.body.return_tokens_as_token_ids),
        )

    def batch(self, prompts: list[EncodedPrompt], params: SamplingParams) -> PromptBatch:
        """Return the prompts as they run; nothing has been submitted yet."""
        for prompt in prompts:
            room = self.engine.max_model_len - len(prompt.token_ids)
            self.metrics.on_params(room if params.max_tokens is None else params.max_tokens)
        return PromptBatch(
            self.engine,
            prompts,
            params,
            response_id=self.response_id,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt or "",
        )


def choose_request_id(header: str | None, field_value: str | None) -> str:
    """Return the header's id if it is fit to be one, else the body's, else a new one."""
    if header is not None and re.fullmatch(REQUEST_ID, header):
        return header
    return field_value or uuid.uuid4().hex
