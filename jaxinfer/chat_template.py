"""Messages → prompt text, through the Jinja template that came with the model.

The template is foreign code: it runs in Jinja's immutable sandbox, sees only plain data, may write
only so much, and whatever goes wrong in it is the request's error, never the engine's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from jaxinfer.errors import ChatTemplateError

MAX_OUTPUT_CHARS = 64 * 2**20
MAX_NESTING = 64

# Marks the end of the message to continue. The trailing space shows whether the template trims.
_END_MARK = "\ue000END-OF-FINAL-MESSAGE\ue000 "


class ChatTemplate:
    """A model's chat template, compiled when first used, so that a broken one harms only chats.

    Args:
        source: Jinja source.
        variables: What the template sees besides the messages: `bos_token`, `eos_token` …
        now: The clock behind `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ):
        self.source = source
        self._variables = dict(variables or {})
        self._now = now
        self._compiled: jinja2.Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the conversation as the model was trained to read it.

        Args:
            messages: Each with a `role` and a `content`: a string or a list of text parts.
            add_generation_prompt: Open the assistant's next turn.
            continue_final_message: Leave the last message open, for the model to go on with it.
            tools: JSON schemas, for templates that know tools.
            kwargs: More variables for the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: The messages are malformed or the template refuses them.
        """
        plain = _messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                _fail(
                    "continue_final_message leaves the last message open, so it needs "
                    "add_generation_prompt=false, got true for both"
                )
            plain[-1]["content"] += _END_MARK
        context = {
            "documents": None,
            **self._variables,
            **{name: _plain(value, name) for name, value in kwargs.items()},
            "messages": plain,
            "tools": None if tools is None else _plain(tools, "tools"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(context)
        return _cut_at_end_mark(text) if continue_final_message else text

    def _run(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        try:
            if self._compiled is None:
                self._compiled = _environment(self._now).from_string(self.source)
            for piece in self._compiled.generate(context):
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    _fail(f"the chat template wrote more than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template does not parse (line {error.lineno}: {error.message}); "
                "use completions instead of chat, or give the model a valid template"
            ) from error
        except SecurityError as error:
            raise ChatTemplateError(
                f"the model's chat template tried what the sandbox forbids: {error}"
            ) from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:
            # Foreign code may raise anything: 1/0, None + "x", endless recursion.
            raise ChatTemplateError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error
        return "".join(pieces)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on: only its content counts."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses `"a" * 10**9` and `"%999999999d" % 1`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if hasattr(value, "__len__") and isinstance(count, int):
                    _check_size(len(value) * count)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right)
        if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{6}|\*)", left):
            raise SecurityError(f"a field as wide as {left!r} asks for")
        return super().call_binop(context, operator, left, right)


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise SecurityError(f"a value of {size} characters, more than {MAX_OUTPUT_CHARS}")


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]
    # Jinja infers the dictionary's type from its own entries; any callable may stand there.
    variables: dict[str, Any] = environment.globals
    variables["raise_exception"] = _raise_exception
    variables["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter writes `<` as \u003c for HTML; a model has to read what was meant.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        _fail(f"messages must be a non-empty list of messages, got {messages!r:.80}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _fail(f"{where} must be an object with role and content, got {message!r:.80}")
    if not isinstance(message.get("role"), str) or not message["role"]:
        _fail(f"{where}.role must be a non-empty string, got {message.get('role')!r:.80}")
    plain = _plain(message, where)
    plain["content"] = _content(message, where)
    return plain


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        # Only a message that calls tools has nothing to say.
        if message.get("tool_calls"):
            return ""
        _fail(f"{where}.content is missing: expected a string or a list of text parts")
    if not isinstance(content, Sequence):
        _fail(f"{where}.content must be a string or a list of text parts, got {content!r:.80}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            _fail(
                f"{where}.content[{i}]: expected a part of type 'text' with a string 'text', got "
                f"{'a text part without text' if kind == 'text' else f'type {kind!r}'}; "
                "this model reads text only"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy made of JSON types only, so that a template finds no methods to call on it."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if depth == MAX_NESTING:
        _fail(f"{where} is nested more than {MAX_NESTING} levels deep")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    return _fail(f"{where} must be made of JSON types, got a {type(value).__name__}")


def _cut_at_end_mark(text: str) -> str:
    start = text.rfind(_END_MARK.strip())
    if start < 0:
        _fail(
            "continue_final_message: the chat template leaves the last message out, so it cannot "
            "be continued"
        )
    kept = text[:start]
    # A template that trims messages would have trimmed this one's end too.
    return kept if text.startswith(_END_MARK, start) else kept.rstrip()


def _fail(message: str) -> NoReturn:
    raise ChatTemplateError(message)
