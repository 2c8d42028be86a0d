"""One API request between its JSON and its answer: what the endpoints with a body share."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from starlette.responses import Response
from starlette.types import Receive

from jaxinfer.errors import InvalidRequestError, UnknownModelError
from jaxinfer.replicas import ServingEngine
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.body_fields import REQUEST_ID, RequestBody
from jaxinfer.server.metrics import ServerMetrics
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.prompt_batch import EncodedPrompt, PromptBatch
from jaxinfer.truncation import Truncation

if TYPE_CHECKING:
    from jaxinfer.request_hooks import HookArguments


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is loaded and warm.

    Attributes:
        name: In the API.
        engine: Runs it.
        generation_config: Its makers' sampling defaults.
        fingerprint: Equal for servers whose answers to a seeded request are equal.
        created: Unix seconds when it became ready.
        hooks: How it is changed; None for the model as it was loaded.
        parent: Name of the model that this one changes.
        edited: The same model changed, by name.
    """

    name: str
    engine: ServingEngine
    generation_config: Mapping[str, Any]
    fingerprint: str
    created: int
    hooks: HookArguments | None = None
    parent: str | None = None
    edited: Mapping[str, ServedModel] = field(default_factory=dict)

    def named(self, name: str | None) -> ServedModel:
        """Return this model if it or none in particular is asked for, or the edited one.

        Raises:
            UnknownModelError: There is none of the name.
        """
        if name is None or name == self.name:
            return self
        if name not in self.edited:
            known = ", ".join(map(repr, (self.name, *self.edited)))
            raise UnknownModelError(
                f"The model {name[:200]!r} does not exist; this server has {known}", "model"
            )
        return self.edited[name]


@dataclass(kw_only=True)
class Call[B: RequestBody]:
    """One request of one endpoint.

    Attributes:
        body: What was asked.
        model: Who answers.
        metrics: Counts it.
        options: Settings of the HTTP side.
        receive: Tells when the client leaves.
        request_id: The client's or a made-up one.
        created: Unix seconds, in the answer and each chunk.
        ran: The prompts that run for it, once they do.
    """

    body: B
    model: ServedModel
    metrics: ServerMetrics
    options: ServerOptions
    receive: Receive
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    ran: PromptBatch | None = field(default=None, init=False)

    schema: ClassVar[type[RequestBody]]
    id_prefix: ClassVar[str] = ""

    async def respond(self) -> Response:
        """Return the answer, whole or as a stream.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError, ClientDisconnect,
            GenerationFailedError: Mapped to statuses by `errors`.
        """
        raise NotImplementedError

    @property
    def engine(self) -> ServingEngine:
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

    def ping_interval_s(self) -> float | None:
        """Return the silence that a stream may have: the request's, else the server's."""
        asked = getattr(self.body, "sse_ping_interval", None)
        interval_s = self.options.sse_ping_interval_s if asked is None else asked
        return interval_s if interval_s > 0 else None

    def batch(self, prompts: Sequence[EncodedPrompt], params: SamplingParams) -> PromptBatch:
        """Return the prompts as they run; nothing has been submitted yet."""
        for prompt in prompts:
            room = self.engine.max_model_len - len(prompt.token_ids)
            self.metrics.on_params(room if params.max_tokens is None else params.max_tokens)
        body: Any = self.body
        cache_salt = getattr(body, "cache_salt", None) or ""
        if getattr(body, "cache_prompt", None) is False:
            # Nobody has this salt, before or after.
            cache_salt = f"{cache_salt}-{uuid.uuid4().hex}"
        self.ran = PromptBatch(
            self.engine,
            prompts,
            params,
            response_id=self.response_id,
            priority=getattr(body, "priority", None) or 0,
            cache_salt=cache_salt,
            progress=bool(getattr(body, "return_progress", None)),
            hooks=self.model.hooks,
        )
        return self.ran

    async def encode_prompt(
        self, prompt: str | list[int], *, add_special_tokens: bool, truncation: Truncation | None
    ) -> EncodedPrompt:
        """Return a text or token ids as the engine runs them."""
        if isinstance(prompt, list):
            if truncation is None:
                return EncodedPrompt(token_ids=prompt)
            ids = truncation.cut(prompt, self.engine.tokenizer.bos_token_id)
            return EncodedPrompt(token_ids=ids, truncated=len(ids) < len(prompt))
        ids = await self.engine.encode(
            prompt, add_special_tokens=add_special_tokens, truncation=_one_more(truncation)
        )
        return self._encoded(ids, prompt, truncation)

    async def encode_prompts(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool,
        truncation: Truncation | None,
    ) -> list[EncodedPrompt]:
        """Return a batch of texts or token ids as the engine runs them."""
        encoded = []
        for prompt in prompts:
            one = await self.encode_prompt(
                prompt, add_special_tokens=add_special_tokens, truncation=truncation
            )
            encoded.append(one)
            # Short texts are encoded on the event loop: a thousand of them must not stop it.
            await asyncio.sleep(0)
        return encoded

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        truncation: Truncation | None = None,
        add_special_tokens: bool = False,
        max_chars: int = 0,
        **template: Any,
    ) -> EncodedPrompt:
        """Return a conversation as the engine runs it. Errors: `AsyncEngine.chat_prompt`.

        Args:
            messages: One conversation.
            truncation: How a prompt that is too long may be cut.
            add_special_tokens: Put the tokenizer's BOS in front of what the template wrote.
            max_chars: A text of no more characters is encoded even if it does not fit.
            template: What the template sees and obeys.
        """
        rendered = await self.engine.chat_prompt(
            messages, truncation=_one_more(truncation), max_chars=max_chars, **template
        )
        prompt = cast(dict[str, Any], rendered)
        text, ids = prompt["prompt"], prompt["prompt_token_ids"]
        if add_special_tokens:
            ids = await self.engine.encode(
                text,
                add_special_tokens=True,
                truncation=_one_more(truncation),
                max_chars=max_chars,
            )
        return self._encoded(ids, text, truncation)

    def template_of(self, source: str | None) -> dict[str, Any]:
        """Return the request's own chat template as an argument of the rendering, if it has one.

        Raises:
            InvalidRequestError: The server does not run templates that requests bring.
        """
        if source is None:
            return {}
        if not self.options.trust_request_chat_template:
            raise InvalidRequestError(
                "chat_template is not trusted here: the server runs the model's own, which "
                "chat_template_kwargs reach. Start it with --trust-request-chat-template to allow "
                "others.",
                "chat_template",
            )
        return {"chat_template": source}

    def _encoded(self, ids: list[int], text: str, truncation: Truncation | None) -> EncodedPrompt:
        if truncation is None:
            return EncodedPrompt(token_ids=ids, text=text)
        kept = truncation.cut(ids, self.engine.tokenizer.bos_token_id)
        return EncodedPrompt(token_ids=kept, text=text, truncated=len(kept) < len(ids))


def choose_request_id(header: str | None, field_value: str | None) -> str:
    """Return the header's id if it is fit to be one, else the body's, else a new one."""
    if header is not None and re.fullmatch(REQUEST_ID, header):
        return header
    return field_value or uuid.uuid4().hex


def _one_more(truncation: Truncation | None) -> Truncation | None:
    """Return what keeps a token too many, by which it shows whether there was one."""
    return truncation and replace(truncation, keep=truncation.keep + 1)
