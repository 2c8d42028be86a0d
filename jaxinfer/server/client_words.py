"""Errors in the words of the client: each dialect has its own names for the same things."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from jaxinfer.errors import InvalidRequestError


@contextmanager
def client_words(**names: str) -> Generator[None]:
    """Rename the fields at fault in what is raised inside: ours → the client's.

    Raises:
        InvalidRequestError: The same as inside, under the client's name.
    """
    try:
        yield
    except InvalidRequestError as error:
        param = error.param or ""
        if param not in names:
            raise
        message = str(error)
        # "max_tokens" in a message is the field; "prompt" may be the thing itself.
        if "_" in param or message.startswith(f"{param} "):
            message = message.replace(param, names[param])
        raise InvalidRequestError(message, names[param]) from error
