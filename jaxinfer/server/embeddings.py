"""`POST /v1/embeddings`: texts in, one vector each out. The served model's own hidden states."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel
from starlette.responses import Response

from jaxinfer.errors import InvalidRequestError
from jaxinfer.request import Pooling
from jaxinfer.server.body_fields import AdmissionFields
from jaxinfer.server.call import Call
from jaxinfer.server.client_words import client_words
from jaxinfer.server.completions import JSON
from jaxinfer.server.errors import GenerationFailedError
from jaxinfer.server.off_loop import off_loop_if_many
from jaxinfer.server.prompt_batch import EncodedPrompt
from jaxinfer.server.prompt_field import prompts_field
from jaxinfer.server.streaming import until_disconnect

MAX_INPUTS = 2048


class VectorFields(AdmissionFields):
    """The fields that all requests for vectors share."""

    pooling: Literal["last", "mean"] | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(VectorFields):
    """The body of `POST /v1/embeddings`."""

    endpoint: ClassVar[str] = "embeddings"

    input: Annotated[list[str | list[int]], *prompts_field("input", most=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None


class EmbeddingUsage(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """One vector: numbers, or little-endian float32 in base64."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The answer of `/v1/embeddings`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """Vectors of a batch of texts.

    Attributes:
        vectors: float32 [n, D].
        num_tokens: Of all texts together.
    """

    vectors: np.ndarray
    num_tokens: int


class VectorCall[B: VectorFields](Call[B]):
    """A request that needs vectors of texts."""

    id_prefix: ClassVar[str] = "embd"

    async def vectors(self, **texts: Sequence[str | list[int]]) -> Vectors:
        """Return the pooled hidden states of all texts, run side by side.

        Args:
            texts: By the name of the field in which they came, one after the other.

        Raises:
            InvalidRequestError: `param` is the name of the field.
        """
        body, longest = self.body, self.engine.max_model_len - 1
        pooling = Pooling(body.pooling or self.options.pooling)
        prompts: list[EncodedPrompt] = []
        for name, some in texts.items():
            with client_words(prompt=name):
                encoded = await self.encode_prompts(
                    some,
                    add_special_tokens=body.add_special_tokens is not False,
                    truncation=body.cut_rule(self.engine.max_model_len, 1),
                )
            for prompt in encoded:
                if len(prompt.token_ids) > longest:
                    raise InvalidRequestError(
                        f"{name} may have {longest} tokens a text, got {len(prompt.token_ids)}; "
                        "send it in parts, or with truncate_prompt_tokens: -1",
                        name,
                    )
            prompts += encoded
        with client_words(prompt=next(iter(texts))):
            rows = await until_disconnect(self.receive, self._run(prompts, pooling))
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return Vectors(vectors=np.stack(rows), num_tokens=num_tokens)

    async def _run(self, prompts: Sequence[EncodedPrompt], pooling: Pooling) -> list[np.ndarray]:
        # As many as can run: a large batch must neither fill the queue nor be refused for it.
        room = asyncio.Semaphore(self.engine.config.max_num_seqs)

        async def one(index: int) -> np.ndarray:
            async with room:
                output = await self.engine.embed(
                    prompts[index].for_engine(),
                    pooling,
                    f"{self.response_id}-{id(self):x}-{index}",
                    priority=self.body.priority or 0,
                    cache_salt=self.body.cache_salt or "",
                    hooks=self.model.hooks,
                )
            if output.embedding is None:
                error = output.outputs[0].error
                raise GenerationFailedError(error or "The engine gave up this request")
            return output.embedding

        tasks = [asyncio.create_task(one(i)) for i in range(len(prompts))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # The first error, or a client that leaves, ends what still runs.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class EmbeddingCall(VectorCall[EmbeddingRequest]):
    """One request to `/v1/embeddings`."""

    schema: ClassVar[type[EmbeddingRequest]] = EmbeddingRequest

    async def respond(self) -> Response:
        """Return the vectors. Errors: `Call.respond`."""
        found = await self.vectors(input=self.body.input)
        size = found.vectors.shape[1]
        if self.body.dimensions not in (None, size):
            raise InvalidRequestError(
                f"dimensions must be {size}, the model's own size, got {self.body.dimensions}: "
                "a prefix of its vectors means nothing",
                "dimensions",
            )
        return await off_loop_if_many(found.vectors.size, self._answer, found)

    def _answer(self, found: Vectors) -> Response:
        vectors = found.vectors
        if self.body.use_activation is not False:
            vectors = unit_length(vectors)
        encode: Any = _floats if self.body.encoding_format != "base64" else _base64
        answer = EmbeddingList(
            id=self.response_id,
            created=self.created,
            model=self.model.name,
            data=[Embedding(index=i, embedding=encode(v)) for i, v in enumerate(vectors)],
            usage=EmbeddingUsage(prompt_tokens=found.num_tokens, total_tokens=found.num_tokens),
        )
        return Response(answer.model_dump_json(), media_type=JSON)


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """Return float32 [n, D] rows scaled to length 1; a row of zeros stays one."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)


def _floats(vector: np.ndarray) -> list[float]:
    return vector.tolist()


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
