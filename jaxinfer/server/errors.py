"""The one place that turns an exception into an HTTP status and an error body.

A body never holds a stack trace, a path or a class name: what we did not raise on purpose reads
"Internal server error" to the client and goes to the log in full.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from jaxinfer.errors import (
    EngineDeadError,
    HostLostError,
    InvalidRequestError,
    JaxinferError,
    QueueFullError,
    ReplicaDeadError,
    UnknownModelError,
)

logger = logging.getLogger("jaxinfer.server")

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 100

# The words are vLLM's where it has one.
ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class GenerationFailedError(JaxinferError):
    """The engine gave up one request, for example on logits that are not numbers; HTTP 500."""


class UnavailableError(JaxinferError):
    """The server takes no requests now: the model loads, or the server shuts down; HTTP 503."""


class UnauthorizedError(JaxinferError):
    """The request bears no key, or one that is not valid here; HTTP 401."""


class TooManyStreamsError(JaxinferError):
    """As many streams are open as the server allows; the same request may succeed later. 429."""


class OutOfTimeError(JaxinferError):
    """The request took longer than the server allows; HTTP 504."""


@dataclass(frozen=True, kw_only=True)
class ErrorReply:
    """What the client is told.

    Attributes:
        status: The HTTP status.
        message: One or two sentences: expected, got, what to do.
        param: The field at fault, if one is.
        headers: Extra response headers.
        kind: The `type` of the body, if it is not the one that the status implies.
        code: The `code` of the body, if it is not the status.
    """

    status: int
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        error = {
            "message": _printable(self.message, MAX_MESSAGE_CHARS),
            "type": self.kind or ERROR_TYPES.get(self.status, "APIError"),
            "param": self.param and _printable(self.param, MAX_PARAM_CHARS),
            "code": self.code or self.status,
        }
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the JSON body in Anthropic's dialect, which does not name the field."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error")
        message = _printable(self.message, MAX_MESSAGE_CHARS)
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, path: str = "") -> Response:
        """Return the whole response, in the dialect of the path."""
        body = self.anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body()
        return JSONResponse(body, self.status, dict(self.headers))


def error_reply(exc: BaseException) -> ErrorReply:
    """Return the reply for any exception. The first rule that fits wins."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    match exc:
        case UnknownModelError():
            return ErrorReply(status=404, message=str(exc), param=exc.param or "model")
        case InvalidRequestError():
            return ErrorReply(status=400, message=str(exc), param=exc.param)
        case QueueFullError() | UnavailableError():
            return ErrorReply(status=503, message=str(exc), headers=retry)
        case TooManyStreamsError():
            return ErrorReply(status=429, message=str(exc), headers=retry)
        case OutOfTimeError():
            # OpenAI's clients would ask again, and wait as long once more.
            headers = {"X-Should-Retry": "false"}
            return ErrorReply(status=504, message=str(exc), headers=headers)
        case UnauthorizedError():
            # OpenAI's words: clients look at both.
            return ErrorReply(
                status=401,
                message=str(exc),
                headers={"WWW-Authenticate": "Bearer"},
                kind="invalid_request_error",
                code="invalid_api_key",
            )
        case ReplicaDeadError():
            message = "The replica that ran this request has stopped; the same request may succeed."
            return ErrorReply(status=503, message=message, headers=retry)
        case EngineDeadError():
            # Its message tells operators what broke, perhaps with paths; it is in the log.
            message = "The engine has stopped after an internal error; restart the server."
            if isinstance(exc.__cause__, HostLostError):
                message = "A host that holds a part of the model is lost; restart all hosts."
            return ErrorReply(status=503, message=message, headers=retry)
        case GenerationFailedError():
            return ErrorReply(status=500, message=str(exc))
        case ClientDisconnect():
            # Nobody reads it; the number, nginx's, is for the metrics.
            return ErrorReply(status=499, message="The client left")
        case HTTPException():
            headers = exc.headers or {}
            return ErrorReply(status=exc.status_code, message=exc.detail, headers=headers)
    # The connection ends behind it: the client must not send its next request there.
    headers = {"Connection": "close"}
    return ErrorReply(status=500, message="Internal server error", headers=headers)


async def handle_error(request: Request, exc: Exception) -> Response:
    """Starlette's exception handler for everything raised before the response started."""
    if isinstance(exc, JaxinferError):
        log_error(exc, getattr(request.state, "request_id", None))
    # Anything else that is unexpected is raised again behind us and logged by uvicorn.
    return error_reply(exc).response(request.url.path)


def log_error(exc: BaseException, request_id: str | None) -> None:
    """Log what an operator must see: our own faults with a trace, refusals not at all."""
    if isinstance(exc, EngineDeadError | GenerationFailedError):
        logger.error("request %s failed: %s", request_id, exc)
    elif error_reply(exc).status == 500:
        logger.error("request %s failed", request_id, exc_info=exc)


def invalid_request(exc: ValidationError) -> InvalidRequestError:
    """Return pydantic's first complaint as ours: in JSON's words and without the input."""
    first = exc.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequestError):
        return cause
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required", param)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return InvalidRequestError(f"{param}: {message}, got {_json_kind(first['input'])}", param)


def _json_kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


def _printable(text: str, most: int) -> str:
    """Return text that is short and can be sent: it may quote half a surrogate pair."""
    text = text if len(text) <= most else text[:most] + "…"
    return text.encode("utf-8", "replace").decode()
