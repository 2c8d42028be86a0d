"""`POST /tokenize` and `/detokenize`, in the dialects of vLLM and of llama.cpp.

Both use the same paths. `/tokenize` tells them apart by the field that holds the text; the requests
of `/detokenize` are the same, so its answer has the text under both names.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from jaxinfer.errors import InvalidRequestError
from jaxinfer.server.body_fields import RequestBody, check_template_kwargs
from jaxinfer.server.call import Call
from jaxinfer.server.completions import JSON
from jaxinfer.server.off_loop import off_loop_if_many
from jaxinfer.server.protocol import Messages, check_continuation

# A text may be counted that is far too long to be answered, but not one of any length.
MAX_CHARS = 2**20
MAX_TOKENS = 2**20
_FORMS = ("prompt", "messages", "content")


class TokenizeRequest(RequestBody):
    """The body of `POST /tokenize`: exactly one of `prompt`, `messages` and `content`."""

    endpoint: ClassVar[str] = "tokenize"

    prompt: str | None = None
    messages: Messages | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(default=None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"send one of prompt, messages (vLLM) and content (llama.cpp), got "
                f"{' and '.join(given) or 'none'}",
                given[0] if given else "prompt",
            )
        if self.messages is not None:
            check_continuation(
                self.messages, self.continue_final_message, self.add_generation_prompt is not False
            )
        check_template_kwargs(self.chat_template_kwargs)
        return self


class Tokens(BaseModel):
    """The answer of `/tokenize` to vLLM's clients."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Piece(BaseModel):
    """One token of llama.cpp's answer: its text, or its bytes if they are no text."""

    id: int
    piece: str | list[int]


class Pieces(BaseModel):
    """The answer of `/tokenize` to llama.cpp's clients."""

    tokens: list[int] | list[Piece]


class DetokenizeRequest(RequestBody):
    """The body of `POST /detokenize`."""

    endpoint: ClassVar[str] = "detokenize"

    tokens: list[int] = Field(max_length=MAX_TOKENS)


class Text(BaseModel):
    """The answer of `/detokenize`: vLLM reads `prompt`, llama.cpp's clients read `content`."""

    prompt: str
    content: str


class TokenizeCall(Call[TokenizeRequest]):
    """One request to `/tokenize`."""

    schema: ClassVar[type[TokenizeRequest]] = TokenizeRequest

    async def respond(self) -> Response:
        """Return the tokens. Errors: `Call.respond`."""
        body = self.body
        if body.content is not None:
            ids = await self._encode(body.content, bool(body.add_special), "content")
            return await off_loop_if_many(len(ids), self._pieces, ids)
        if body.messages is not None:
            prompt = await self.encode_chat(
                body.messages,
                add_special_tokens=bool(body.add_special_tokens),
                max_chars=MAX_CHARS,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                **self.template_of(body.chat_template),
                **(body.chat_template_kwargs or {}),
            )
            ids = prompt.token_ids
        else:
            ids = await self._encode(
                body.prompt or "", body.add_special_tokens is not False, "prompt"
            )
        return await off_loop_if_many(len(ids), self._tokens, ids)

    def _pieces(self, ids: list[int]) -> Response:
        """Return llama.cpp's answer."""
        token_bytes = self.engine.tokenizer.token_bytes
        tokens: Any = ids
        if self.body.with_pieces:
            tokens = [Piece(id=i, piece=_piece(token_bytes(i))) for i in ids]
        return Response(Pieces(tokens=tokens).model_dump_json(), media_type=JSON)

    def _tokens(self, ids: list[int]) -> Response:
        """Return vLLM's answer."""
        text = self.engine.tokenizer.token_text
        answer = Tokens(
            count=len(ids),
            max_model_len=self.engine.max_model_len,
            tokens=ids,
            token_strs=[text(i) for i in ids] if self.body.return_token_strs else None,
        )
        return Response(answer.model_dump_json(), media_type=JSON)

    async def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        if len(text) > MAX_CHARS:
            raise InvalidRequestError(
                f"{param} may have {MAX_CHARS} characters, got {len(text)}; send it in parts", param
            )
        return await self.engine.encode(
            text, add_special_tokens=add_special_tokens, max_chars=MAX_CHARS
        )


class DetokenizeCall(Call[DetokenizeRequest]):
    """One request to `/detokenize`."""

    schema: ClassVar[type[DetokenizeRequest]] = DetokenizeRequest

    async def respond(self) -> Response:
        """Return the text, special tokens spelled out. Errors: `Call.respond`."""
        vocab_size = self.engine.vocab_size
        for token_id in self.body.tokens:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"tokens: {token_id} is outside the vocabulary of {vocab_size}", "tokens"
                )
        return await off_loop_if_many(len(self.body.tokens), self._text)

    def _text(self) -> Response:
        text = self.engine.tokenizer.decode(self.body.tokens, skip_special_tokens=False)
        return Response(Text(prompt=text, content=text).model_dump_json(), media_type=JSON)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
