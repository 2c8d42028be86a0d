"""The fields that request bodies share, and their way to `SamplingParams`. Knows no endpoint.

Types are strict: `"0.5"` is not a number, `true` is not 1 and `40.0` is not an integer, because a
client that sends those has a bug which guessing would hide. Ranges are checked once, by
`SamplingParams`. null always means the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from jaxinfer.errors import InvalidRequestError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.truncation import Truncation

MAX_REQUEST_ID_CHARS = 128
MAX_LOGPROB_TOKEN_IDS = 128

# Also a response header, so nothing that could break out of one.
REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

# What `generation_config.json` may set, as in vLLM; its `max_new_tokens` is left out because it is
# a limit of the makers' demo, not of the model.
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "self",
        "add_special_tokens",
        "truncation",
        "max_chars",
    }
)


def _stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if strings is not None and (
        not isinstance(strings, list) or not all(isinstance(s, str) for s in strings)
    ):
        raise InvalidRequestError("stop must be a string or a list of strings", "stop")
    return strings


def _logit_bias(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        value = _from_pairs(value)
    if not isinstance(value, dict):
        raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(
                f"logit_bias: the keys must be token ids, got {key[:40]!r}", "logit_bias"
            )
        if type(bias) not in (int, float):
            raise InvalidRequestError("logit_bias: the values must be numbers", "logit_bias")
    return {int(key): bias for key, bias in value.items()}


def _from_pairs(pairs: list[Any]) -> dict[str, Any]:
    """Return llama.cpp's [[token id, number], …] as OpenAI's mapping; it has more forms."""
    if not all(isinstance(p, list) and len(p) == 2 and type(p[0]) is int for p in pairs):
        raise InvalidRequestError(
            "logit_bias must map token ids to numbers, or be a list of [token id, number]; to rule "
            "out a text use bad_words",
            "logit_bias",
        )
    bias = {str(token_id): number for token_id, number in pairs}
    if len(bias) < len(pairs):
        raise InvalidRequestError("logit_bias names a token twice", "logit_bias")
    return bias


_TEXT = {"type": "string"}
Stop = Annotated[
    list[str] | None,
    PlainValidator(_stop),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}),
]
LogitBias = Annotated[
    dict[int, float] | None,
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number"}},
                {
                    "type": "array",
                    "items": {"prefixItems": [{"type": "integer"}, {"type": "number"}]},
                },
                {"type": "null"},
            ]
        }
    ),
]


class RequestBody(BaseModel):
    """What every body may hold.

    Attributes:
        endpoint: The name of its rows in `field_table.FATES`.
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    endpoint: ClassVar[str]

    model: str | None = None
    request_id: str | None = None

    @model_validator(mode="after")
    def _check_request_id(self) -> RequestBody:
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            raise InvalidRequestError(
                f"request_id must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters "
                "without spaces",
                "request_id",
            )
        return self


class AdmissionFields(RequestBody):
    """How a prompt is admitted: cut, ranked, shared."""

    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None

    def cut_rule(self, max_model_len: int, num_output_tokens: int) -> Truncation | None:
        """Return how the prompt may be cut, None if it must not.

        Raises:
            InvalidRequestError: More tokens are to be kept than the context holds, or none.
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return None
        if keep == -1:
            keep = max(1, max_model_len - num_output_tokens)
        if not 0 < keep <= max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or in [1, {max_model_len}], got {keep}",
                "truncate_prompt_tokens",
            )
        return Truncation(keep=keep, side=self.truncation_side or "left")


class SamplingFields(AdmissionFields):
    """How to sample. Meaning and ranges: `SamplingParams`, `field_table`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: LogitBias = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    def _sampling_params(
        self, generation_config: Mapping[str, Any], **resolved: Any
    ) -> SamplingParams:
        return sampling_params(self, generation_config, **resolved)


def sampling_params(
    body: BaseModel, generation_config: Mapping[str, Any], **resolved: Any
) -> SamplingParams:
    """Return a request's parameters: its own values, else the model's, else the API's.

    Args:
        body: Fields of `SamplingParams`' names are taken from it.
        generation_config: The model's defaults.
        resolved: What the endpoint names or counts in its own way.

    Raises:
        InvalidRequestError: A value is out of range.
    """
    values = {
        name: generation_config[name]
        for name in _MODEL_DEFAULTS
        if generation_config.get(name) is not None
    }
    known = SamplingParams.__dataclass_fields__.keys() & type(body).model_fields.keys()
    values |= {name: v for name in known if (v := getattr(body, name)) is not None}
    params = SamplingParams(**(values | resolved))
    if params.greedy and params.n > 1:
        raise InvalidRequestError(
            "n must be 1 at temperature 0: all samples would be the same", "n"
        )
    return params


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> None:
    """Refuse variables that would stand for arguments of the rendering.

    Raises:
        InvalidRequestError: `param` is "chat_template_kwargs".
    """
    for name in _RESERVED_KWARGS & set(kwargs or ()):
        raise InvalidRequestError(
            f"chat_template_kwargs must not hold {name}: it has a meaning of its own",
            "chat_template_kwargs",
        )


def check_num_logprobs(name: str, value: int | None, most: int) -> None:
    """Refuse more alternatives than the server gives; -1, the whole vocabulary, is more.

    Raises:
        InvalidRequestError: `param` is `name`.
    """
    if value is not None and not 0 <= value <= most:
        raise InvalidRequestError(f"{name} must be in [0, {most}], got {value}", name)
