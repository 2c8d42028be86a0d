"""What becomes of each request field, by endpoint: the rules. The rows are in `field_table`.

The table drives validation (a refused field is a 400 that names it), the OpenAPI document and the
page `docs/reference/http.md`; what it calls implemented is exactly what the pydantic models take. A
field in no row is unknown: it is accepted, because clients send extras, and logged once. A refused
field is accepted at its neutral values, at which it asks for nothing: clients send whole objects
with nulls and defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.errors import InvalidRequestError

logger = logging.getLogger("jaxinfer.server")


@dataclass(frozen=True, kw_only=True)
class Implemented:
    """A field that does what its own API says.

    Attributes:
        meaning: One or two sentences for the reference.
    """

    meaning: str


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Another API's name for an implemented field; translated before validation.

    Attributes:
        of: The implemented field.
        needs: Another field and the value at which the two names mean exactly the same.
        neutral: Values at which it asks for nothing, whatever `needs`.
        hint: Ends the refusal where `needs` is not met.
    """

    of: str
    needs: tuple[str, Any] | None = None
    neutral: tuple[Any, ...] = ()
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A field that asks for something this server cannot do.

    Attributes:
        neutral: Values besides null at which it asks for nothing.
        hint: What to do instead; ends the error message.
    """

    neutral: tuple[Any, ...] = ()
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """A field that changes nothing here, whatever its value.

    Attributes:
        why: Why ignoring it gives nobody a wrong answer.
    """

    why: str


type Fate = Implemented | Alias | Refused | Ignored


def translate(
    body: Mapping[str, Any], fates: Mapping[str, Fate]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body in the words of this server, and which word stands for the client's.

    Raises:
        InvalidRequestError: It asks for what is not implemented; `param` names the field.
    """
    result = dict(body)
    spelled: dict[str, str] = {}
    for name, value in body.items():
        fate = fates.get(name)
        if value is None or not isinstance(fate, Refused | Alias):
            continue
        if any(_same(value, neutral) for neutral in fate.neutral):
            if isinstance(fate, Alias):
                del result[name]
            continue
        if isinstance(fate, Refused):
            # OpenAI's best_of, as vLLM's: only the case in which nothing is thrown away.
            if name == "best_of" and _same(value, body.get("n") or 1):
                continue
            raise InvalidRequestError(f"{name} is not supported. {fate.hint}".rstrip(), name)
        if fate.needs is not None and not _same(body.get(fate.needs[0]), fate.needs[1]):
            raise InvalidRequestError(f"{name} is not supported so. {fate.hint}".rstrip(), name)
        if body.get(fate.of) is not None and not _same(body[fate.of], value):
            raise InvalidRequestError(
                f"{name} and {fate.of} mean the same here, but differ; send one of them", name
            )
        result[fate.of] = result.pop(name)
        spelled[fate.of] = name
    return result, spelled


class UnknownFieldLog:
    """Warns of each unknown field once. Bounded: names come from clients.

    Args:
        warn: Called with a printf-style message.
    """

    MAX_NAMES = 200
    MAX_NAME_CHARS = 64

    def __init__(self, warn: Callable[..., None] = logger.warning):
        self._warn = warn
        self._seen: set[str] = set()

    def note(self, names: Iterable[str], fates: Mapping[str, Fate]) -> None:
        """Warn of the fields that are in no row of the table."""
        for name in names:
            if name in fates or len(self._seen) >= self.MAX_NAMES:
                continue
            short = name[: self.MAX_NAME_CHARS]
            if short not in self._seen:
                self._seen.add(short)
                self._warn("ignoring the unknown request field %r", short)


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, but `"mirostat": true` is not `"mirostat": 0`'s neighbour.
    return type(value) is type(neutral) and value == neutral
