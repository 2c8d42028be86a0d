"""Errors in the words of the client: each dialect has its own names for the same things."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from jaxinfer.errors import InvalidRequestError

# Also words of their own ("the prompt has 9 tokens"): names of fields only where a message begins.
_ALSO_WORDS = frozenset({"prompt", "stop", "messages"})


@contextmanager
def client_words(**names: str) -> Generator[None]:
    """Rename the fields at fault in what is raised inside: ours → the client's.

    Raises:
        InvalidRequestError: The same as inside, under the client's name.
    """
    try:
        yield
    except InvalidRequestError as error:
        if error.param not in names:
            raise
        raise renamed(error, names) from error


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """Return the error, its field under the name that `names` has for it, if it has one."""
    ours = error.param or ""
    if ours not in names:
        return error
    start = "^" if ours in _ALSO_WORDS else r"(?<!\w)"
    message = re.sub(rf"{start}{re.escape(ours)}(?!\w)", names[ours], str(error))
    result = type(error)(message, names[ours])
    result.__cause__ = error
    return result
