"""Text ↔ token ids and chat messages → text, whatever file the vocabulary came from.

Knows no engine and opens no file. `jaxinfer.gguf_tokenizer` turns GGUF metadata into the same
`tokenizers.Tokenizer` that a `tokenizer.json` gives; from there on the two are one path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxinfer import gguf_tokenizer
from jaxinfer.chat_template import ChatTemplate
from jaxinfer.errors import ChatTemplateError, InvalidRequestError, ModelError
from jaxinfer.token_pieces import TokenPieces

if TYPE_CHECKING:
    from checkpoints import TextAssets

_SPECIAL_ROLES = ("bos", "eos", "unk", "pad")
_GGUF_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads at once.

    Attributes:
        vocab_size: Highest token id + 1; the model's may be larger, padded.
        bos_token_id: Begins a text, None if the vocabulary has none.
        eos_token_ids: All tokens that end a turn or a text.
        special_token_ids: Not part of the text under `skip_special_tokens`.
        strips_leading_space: Whether a text starts without the space that its first token carries.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_templates: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_templates = {
            name: ChatTemplate(source, {f"{k}_token": v for k, v in special_tokens.items()})
            for name, source in (chat_templates or {}).items()
        }
        self._config = dict(config or {})
        self._pieces = TokenPieces(backend)
        self.strips_leading_space = self._pieces.strips_leading_space
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        ids = {role: backend.token_to_id(token) for role, token in special_tokens.items()}
        self.bos_token_id: int | None = ids.get("bos")
        self.special_token_ids = frozenset(
            {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
            | {i for i in ids.values() if i is not None}
        )
        self._pieces.literal |= self.special_token_ids
        eos = {*eos_token_ids, *_end_tokens(backend)} | {ids.get("eos")}
        self.eos_token_ids = frozenset(i for i in eos if i is not None and 0 <= i < self.vocab_size)
        prefix, suffix = _affixes(backend)
        if add_bos is not None:
            prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        if add_eos is not None:
            suffix = [ids["eos"]] if add_eos and ids.get("eos") is not None else []
        if prefix and self.bos_token_id is None:
            self.bos_token_id = prefix[0]
        self._prefix: list[int] = prefix
        self._suffix: list[int] = suffix

    @classmethod
    def from_assets(
        cls,
        text: TextAssets,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Build the tokenizer of a checkpoint.

        Args:
            text: Its text files or GGUF metadata.
            config: Its `config.json`, for the end-of-sequence ids.
            generation_config: Its `generation_config.json`, for the same.

        Raises:
            ModelError: There is no tokenizer, or it is of a kind unknown here.
        """
        eos = [
            *_ids((config or {}).get("eos_token_id")),
            *_ids((generation_config or {}).get("eos_token_id")),
        ]
        settings = dict(text.tokenizer_config or {})
        metadata = text.gguf_metadata or {}
        templates = _chat_templates(text, settings, metadata)
        if text.tokenizer_json is not None:
            backend = _parse(text.tokenizer_json)
            special = _named_special_tokens(settings)
        elif metadata.get("tokenizer.ggml.tokens"):
            backend = gguf_tokenizer.build(metadata)
            special = _gguf_special_tokens(metadata)
            settings |= {
                "add_bos_token": gguf_tokenizer.adds_bos(metadata),
                "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
            }
            for key in ("eot", "eom"):
                eos += _ids(metadata.get(f"tokenizer.ggml.{key}_token_id"))
        else:
            raise ModelError(
                "the checkpoint has no tokenizer: expected tokenizer.json beside the weights or "
                "tokenizer.* keys in the GGUF file; name another source with `tokenizer=`"
            )
        return cls(
            backend,
            special_tokens=special,
            eos_token_ids=eos,
            add_bos=settings.get("add_bos_token"),
            add_eos=settings.get("add_eos_token"),
            chat_templates=templates,
            config=settings,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with BOS in front exactly once where the model wants it.

        Special tokens that the text spells out count as such, so a text that already starts with
        BOS gets no second one.

        Raises:
            InvalidRequestError: The text is not a string or holds half a surrogate pair.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"prompt must be a string, got {text!r:.80}", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"prompt holds half a surrogate pair at character {error.start}, which is no text",
                "prompt",
            ) from error
        # As a batch of one: only batches let other threads run meanwhile.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        if self._prefix and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        if self._suffix and ids[-len(self._suffix) :] != self._suffix:
            ids = ids + self._suffix
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join(self._pieces[i] for i in ids if i not in skipped)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, with U+FFFD for half a character."""
        return self._pieces[token_id].decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; b"" for an id that the vocabulary does not have."""
        return self._pieces[token_id]

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """Return the token sequences that spell a word, at a word's start and inside a word.

        A sequence that another one ends with is left out: the shorter one covers it.
        """
        bare = word.lstrip() or word
        inside, spaced = self._encode_inside(bare), self._encode_inside(f" {bare}")
        if not inside or not spaced or spaced[-len(inside) :] == inside:
            return [ids for ids in (inside or spaced,) if ids]
        return [inside, spaced]

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return bool(self._chat_templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the conversation as text; see `jaxinfer.chat_template.ChatTemplate.render`.

        With `chat_template`, Jinja source, that one is used instead of the model's.
        """
        if chat_template is not None:
            variables = {f"{role}_token": token for role, token in self._special_tokens.items()}
            template = ChatTemplate(chat_template, variables)
        elif not self._chat_templates:
            raise ChatTemplateError(
                "this model has no chat template, so it cannot take messages; "
                "send a prompt to completions instead"
            )
        else:
            name = "tool_use" if tools and "tool_use" in self._chat_templates else "default"
            template = self._chat_templates.get(name) or next(iter(self._chat_templates.values()))
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **kwargs,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template: Any) -> list[int]:
        """Return the conversation's token ids. The template writes BOS itself; none is added."""
        text = self.render_chat(messages, **template)
        try:
            return self.encode(text, add_special_tokens=False)
        except InvalidRequestError as error:
            raise ChatTemplateError(f"messages: {error}") from error

    def to_tokenizer_json(self) -> str:
        """Return the vocabulary as the text of a `tokenizer.json`."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        if self._prefix and _affixes(copy)[0] != self._prefix:
            tokens = [(self._backend.id_to_token(i), i) for i in self._prefix]
            names = [token for token, _ in tokens]
            copy.post_processor = TemplateProcessing(single=[*names, "$A"], special_tokens=tokens)
        return copy.to_str()

    def tokenizer_config(self) -> dict[str, Any]:
        """Return what `tokenizer_config.json` has to say beside `to_tokenizer_json`."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config}
        config |= {f"{role}_token": token for role, token in self._special_tokens.items()}
        config |= {"add_bos_token": bool(self._prefix), "add_eos_token": bool(self._suffix)}
        sources = {name: template.source for name, template in self._chat_templates.items()}
        if set(sources) == {"default"}:
            config["chat_template"] = sources["default"]
        elif sources:
            config["chat_template"] = [{"name": n, "template": s} for n, s in sources.items()]
        return config

    def _encode_inside(self, text: str) -> list[int]:
        # After another character a text is encoded as it is anywhere but at the very start, where
        # SentencePiece would put its word mark in front. Some vocabularies have tokens that begin
        # with a line break; hardly any has one that begins with NUL.
        for before in ("\n", "\0"):
            anchor = self.encode(before, add_special_tokens=False)
            ids = self.encode(before + text, add_special_tokens=False)
            if anchor and ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self.encode(text, add_special_tokens=False)


def _parse(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        # `tokenizers` raises a bare Exception for whatever it cannot read.
        raise ModelError(f"tokenizer.json cannot be read: {error}") from error


def _affixes(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return what the post-processor puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def _end_tokens(backend: tokenizers.Tokenizer) -> set[int]:
    """Return the special tokens that by their name end a turn or a text."""
    special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    ends = gguf_tokenizer.END_TOKENS & special.keys()
    if "<|return|>" in ends:
        # In OpenAI's harmony format <|end|> only ends a message; the turn goes on.
        ends = ends - {"<|end|>"}
    return {special[token] for token in ends}


def _ids(value: Any) -> list[int]:
    """One id, several, or none, as configs have them."""
    values = value if isinstance(value, list | tuple) else [value]
    ids = [i for i in values if i is not None]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelError(
            f"eos_token_id must be a token id or a list of them, got {value!r:.80}; correct it in "
            "config.json or generation_config.json"
        )
    return ids


def _named_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for role in _SPECIAL_ROLES:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            named[role] = token
    return named


def _gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {}
    for role, key in _GGUF_ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= int(token_id) < len(tokens):
            named[role] = tokens[int(token_id)]
    return named


def _chat_templates(
    text: TextAssets, settings: dict[str, Any], metadata: Mapping[str, Any]
) -> dict[str, str]:
    """Return the templates by name; a file of its own comes before the config and the metadata."""
    configured = settings.pop("chat_template", None)
    if isinstance(configured, list):
        templates = {entry["name"]: entry["template"] for entry in configured}
    else:
        templates = {"default": configured} if configured else {}
    prefix = "tokenizer.chat_template."
    templates |= {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    default = text.chat_template or metadata.get("tokenizer.chat_template")
    return templates | ({"default": default} if default else {})
