"""All routes in one table: what each takes, what it answers. The rest is made from it.

Routes, the OpenAPI document, the page `/docs` and `docs/reference/http.md` read it. Only the files
of the playground are not in it: they are a client of these routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jaxinfer.server.anthropic import (
    CountTokensCall,
    Message,
    MessagesCall,
    TokenCount,
)
from jaxinfer.server.call import Call
from jaxinfer.server.chat import ChatCall
from jaxinfer.server.completions import CompletionCall
from jaxinfer.server.embeddings import EmbeddingCall, EmbeddingList
from jaxinfer.server.info import Health, Load, ModelCard, ModelList, Version
from jaxinfer.server.render import RenderCall, RenderedChat
from jaxinfer.server.response_object import ResponseObject
from jaxinfer.server.responses import ChatCompletion, Completion
from jaxinfer.server.responses_api import ResponseCall
from jaxinfer.server.scoring import ScoreCall, ScoreList
from jaxinfer.server.tokenize import (
    DetokenizeCall,
    Pieces,
    Text,
    TokenizeCall,
    Tokens,
)

MODEL_PATH = "/v1/models/{model:path}"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One route.

    Attributes:
        path: As Starlette spells it.
        summary: One sentence for the reference.
        call: What answers a request with a body.
        handler: For one without: the name of a method of `info.Info`.
        answers: The shapes of its JSON, any of them; none for something else than JSON.
        media_type: Of the answer.
        streams: Whether `stream: true` turns the answer into server-sent events.
        methods: HTTP's.
    """

    path: str
    summary: str
    call: type[Call] | None = None
    handler: str = ""
    answers: tuple[type[BaseModel], ...] = ()
    media_type: str = "application/json"
    streams: bool = False
    methods: tuple[str, ...] = ("POST",)


def _get(path: str, summary: str, handler: str, **more: Any) -> Endpoint:
    settings: dict[str, Any] = {"methods": ("GET",), **more}
    return Endpoint(path=path, summary=summary, handler=handler, **settings)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        path="/v1/completions",
        summary="Continue a text, or each of a batch of texts.",
        call=CompletionCall,
        answers=(Completion,),
        streams=True,
    ),
    Endpoint(
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        call=ChatCall,
        answers=(ChatCompletion,),
        streams=True,
    ),
    Endpoint(
        path="/v1/chat/completions/render",
        summary="Show what a chat request would run: text, token ids, parameters.",
        call=RenderCall,
        answers=(RenderedChat,),
    ),
    Endpoint(
        path="/v1/responses",
        summary="Answer a conversation in OpenAI's newer dialect; nothing is stored.",
        call=ResponseCall,
        answers=(ResponseObject,),
        streams=True,
    ),
    Endpoint(
        path="/v1/messages",
        summary="Answer a conversation in Anthropic's dialect.",
        call=MessagesCall,
        answers=(Message,),
        streams=True,
    ),
    Endpoint(
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a conversation in Anthropic's dialect.",
        call=CountTokensCall,
        answers=(TokenCount,),
    ),
    Endpoint(
        path="/v1/embeddings",
        summary="One vector per text: the model's own hidden states, pooled.",
        call=EmbeddingCall,
        answers=(EmbeddingList,),
    ),
    Endpoint(
        path="/v1/score",
        summary="How alike texts are: the cosine of their vectors.",
        call=ScoreCall,
        answers=(ScoreList,),
    ),
    Endpoint(
        path="/score", summary="The same as `/v1/score`.", call=ScoreCall, answers=(ScoreList,)
    ),
    Endpoint(
        path="/tokenize",
        summary="Text or messages to token ids, in vLLM's dialect or llama.cpp's.",
        call=TokenizeCall,
        answers=(Tokens, Pieces),
    ),
    Endpoint(
        path="/detokenize",
        summary="Token ids to text, for clients of vLLM and of llama.cpp.",
        call=DetokenizeCall,
        answers=(Text,),
    ),
    _get("/v1/models", "The served model.", "models", answers=(ModelList,)),
    _get(MODEL_PATH, "The served model by its name.", "model", answers=(ModelCard,)),
    _get(
        "/health",
        "200 when ready; 503 before, while shutting down and after a failure.",
        "health",
        answers=(Health,),
    ),
    _get(
        "/health/generate",
        "200 when the model has just produced a token.",
        "health_generate",
        answers=(Health,),
    ),
    _get("/ping", "The same as `/health`.", "health", answers=(Health,), methods=("GET", "POST")),
    _get("/version", "The version of the server.", "version", answers=(Version,)),
    _get("/load", "Requests with a body that are being answered.", "load", answers=(Load,)),
    _get("/metrics", "Counters in Prometheus' text format.", "metrics", media_type="text/plain"),
    _get("/metrics/", "The same as `/metrics`.", "metrics", media_type="text/plain"),
    _get("/openapi.json", "This interface as an OpenAPI document.", "openapi"),
    _get("/docs", "This interface as a page to read.", "docs", media_type="text/html"),
)
