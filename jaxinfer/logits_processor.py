"""A change to a request's logits: a pure function and the state it starts with. Nothing here acts.

Knows no jax, so that a request can carry one. `jaxinfer.processing` compiles the function into the
sampler; `jaxinfer.builtin_processors` has those that come with the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.errors import InvalidRequestError, quoted


@dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """A function from logits and state to logits and state, and the state before the first token.

    The function is traced for one row and must be pure: `(logits, state) → (logits, state)`, or
    `(logits, state, row)` if it looks at the tokens so far, a `jaxinfer.processing.Row`. The logits
    are float32 [V], after bias, allowed ids and penalties, before temperature; what is -inf stays
    ruled out. What comes back has the shapes and dtypes that went in.

    Parameters belong into the state: functions are told apart by identity and compiled once, states
    are arrays and may have any values. So define the function at module level.

    Attributes:
        function: See above.
        state: A pytree of numbers and arrays. Floats become float32, integers int32.
        takes_row: Whether the function has a third argument; found out.

    Raises:
        InvalidRequestError: The function takes neither two nor three arguments.

    Example:
        ```python
        def favour_short(logits, state):
            boost = state["step"] * state["slope"]
            return logits.at[state["end"]].add(boost), {**state, "step": state["step"] + 1}


        processor = LogitsProcessor(favour_short, {"end": 2, "slope": 0.1, "step": 0})
        params = SamplingParams(logits_processors=[processor])
        ```
    """

    function: Callable[..., tuple[Any, Any]]
    state: Any = ()
    takes_row: bool = field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidRequestError(
                f"logits_processors: expected a function, got {quoted(self.function)}",
                "logits_processors",
            )
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except ValueError as error:  # some functions written in C do not tell
            raise InvalidRequestError(
                f"logits_processors: {self.name} does not tell what it takes; wrap it in a function"
                " of (logits, state)",
                "logits_processors",
            ) from error
        count = sum(p.kind in kinds and p.default is p.empty for p in parameters)
        if count not in (2, 3):
            raise InvalidRequestError(
                f"logits_processors: {self.name} must take (logits, state) or (logits, state, row),"
                f" it takes {count} arguments",
                "logits_processors",
            )
        object.__setattr__(self, "takes_row", count == 3)

    @property
    def name(self) -> str:
        """The function's module and name: for people, and for snapshots."""
        function = self.function
        own = getattr(function, "__qualname__", type(function).__qualname__)
        return f"{getattr(function, '__module__', '?')}:{own}"


def as_processors(value: Any) -> tuple[LogitsProcessor, ...]:
    """Return a request's processors; a bare function has an empty state.

    Raises:
        InvalidRequestError: It is no list of them, or one occurs twice.
    """
    param = "logits_processors"
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{param} must be a list, got {type(value).__name__}", param)
    processors = tuple(p if isinstance(p, LogitsProcessor) else LogitsProcessor(p) for p in value)
    functions = [p.function for p in processors]
    for i, function in enumerate(functions):
        if function in functions[:i]:
            raise InvalidRequestError(f"{param}: {processors[i].name} occurs twice", param)
    return processors
