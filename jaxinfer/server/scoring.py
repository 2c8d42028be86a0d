"""`POST /v1/score`: how alike texts are, as the cosine of their vectors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, PlainValidator, WithJsonSchema
from starlette.responses import Response

from jaxinfer.errors import InvalidRequestError
from jaxinfer.server.completions import JSON
from jaxinfer.server.embeddings import (
    MAX_INPUTS,
    EmbeddingUsage,
    VectorCall,
    VectorFields,
    unit_length,
)

_TEXT = {"type": "string", "minLength": 1}
_SCHEMA = WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]})


def _texts(name: str) -> Any:
    def validate(value: Any) -> list[str]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError(f"{name} must be a string or a list of strings", name)
        if not texts or not all(texts):
            raise InvalidRequestError(f"{name} must not be empty", name)
        if len(texts) > MAX_INPUTS:
            raise InvalidRequestError(f"{name}: at most {MAX_INPUTS} texts, got {len(texts)}", name)
        return texts

    return PlainValidator(validate)


class ScoreRequest(VectorFields):
    """The body of `POST /v1/score`."""

    endpoint: ClassVar[str] = "score"

    text_1: Annotated[list[str], _texts("text_1"), _SCHEMA]
    text_2: Annotated[list[str], _texts("text_2"), _SCHEMA]


class Score(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(BaseModel):
    """The answer of `/v1/score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class ScoreCall(VectorCall[ScoreRequest]):
    """One request to `/v1/score`."""

    id_prefix: ClassVar[str] = "score"
    schema: ClassVar[type[ScoreRequest]] = ScoreRequest

    async def respond(self) -> Response:
        """Return the score of each pair: one text with each, or the i-th with the i-th."""
        left, right = self.body.text_1, self.body.text_2
        if len(left) not in (1, len(right)):
            raise InvalidRequestError(
                f"text_1 must hold one text, or as many as text_2: got {len(left)} and "
                f"{len(right)}",
                "text_1",
            )
        found = await self.vectors(text_1=left, text_2=right)
        unit = unit_length(found.vectors)
        scores = np.sum(unit[: len(left)] * unit[len(left) :], axis=-1, dtype=np.float64)
        answer = ScoreList(
            id=self.response_id,
            created=self.created,
            model=self.model.name,
            data=[Score(index=i, score=score) for i, score in enumerate(scores.tolist())],
            usage=EmbeddingUsage(prompt_tokens=found.num_tokens, total_tokens=found.num_tokens),
        )
        return Response(answer.model_dump_json(), media_type=JSON)
