"""The small files beside the weights: configs and tokenizer, as Hugging Face lays them out.

Knows no weights. An Orbax folder of ours holds the same files.
"""

import json
from pathlib import Path
from typing import Any

from checkpoints.checkpoint import TextAssets
from checkpoints.errors import CorruptFileError, MissingFileError, readable


def read_config(folder: Path) -> dict[str, Any]:
    """Content of `config.json`.

    Raises:
        MissingFileError: There is none.
        CorruptFileError: It is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise MissingFileError(
            f"{folder} holds weights but no config.json, which says how to build the model; "
            "put the config.json of the model beside the weights"
        )
    return read_json(path)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Content of `generation_config.json`, or {}."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def read_text_assets(folder: Path) -> TextAssets:
    """Tokenizer and chat template from the files of `folder`.

    Raises:
        CorruptFileError: One of the files is not what its name says.
    """
    tokenizer = folder / "tokenizer.json"
    config_path = folder / "tokenizer_config.json"
    tokenizer_config = read_json(config_path) if config_path.is_file() else {}
    return TextAssets(
        tokenizer_json=_read_text(tokenizer) if tokenizer.is_file() else None,
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path}: expected a JSON object, got {content!r:.80}")
    return content


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    # The file of its own is the newer place and wins, as in transformers.
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    path = folder / "chat_template.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    template = template or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_text(path: Path) -> str:
    try:
        with readable(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path} is not UTF-8 ({error}); fetch the file again") from error
