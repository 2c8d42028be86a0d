"""`--config file.yaml`: settings by the names of a command's flags. Knows no setting itself."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from jaxinfer.cli_options import environment_variable
from jaxinfer.errors import ConfigError


def read_settings(path: Path) -> dict[str, Any]:
    """Return the file's settings, names spelled with underscores.

    Raises:
        ConfigError: It cannot be read, or is not a mapping of names to values.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        found = yaml.load(text, Loader=_Loader)  # a SafeLoader, below
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{path} must be a mapping of settings to values, such as `port: 9000`")
    settings: dict[str, Any] = {}
    for name, value in found.items():
        known = name.replace("-", "_")
        if known in settings:
            raise ConfigError(f"{path}: {name} occurs twice")
        settings[known] = value
    return settings


def _apply(ctx: typer.Context, param: Any, path: Path | None) -> Path | None:
    """Make the file's settings the defaults of the command's other flags."""
    if path is None or ctx.resilient_parsing:
        return path
    flags = {p.name: p for p in ctx.command.params if p.name not in (param.name, "help")}
    flags = {name: p for name, p in flags.items() if p.param_type_name == "option"}
    defaults: dict[str, Any] = {}
    for name, value in read_settings(path).items():
        if name not in flags:
            raise ConfigError(f"{path}: unknown setting {name!r}{_meant(name, flags)}")
        if value is not None:
            defaults[name] = _checked(ctx, flags[name], value, f"{path}: {name}")
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of settings, named as the flags: `max_num_seqs: 8`. A flag wins over its"
        " environment variable, that one over the file, and the file over the default.".replace(
            "`", ""
        ),
        envvar=environment_variable("config"),
        # Before the others, whose defaults it changes.
        is_eager=True,
        callback=_apply,
    ),
]


def _checked(ctx: typer.Context, flag: Any, value: Any, where: str) -> Any:
    """Return the value as words of a command line: one rule for what is legal, wherever it stands.

    Raises:
        ConfigError: The flag would not take it.
    """
    given = value if isinstance(value, list) else [value]
    if any(isinstance(item, list | dict) for item in given):
        raise ConfigError(f"{where} must be a plain value or a list of plain values")
    if isinstance(value, list) and not flag.multiple:
        raise ConfigError(f"{where} takes one value, got a list")
    words: Any = [str(item) for item in given]
    if not flag.multiple:
        [words] = words
    try:
        flag.process_value(ctx, words)
    except Exception as error:
        # typer's own copy of click has this error in recent versions, click itself in older ones.
        if not hasattr(error, "format_message"):
            raise
        reason = getattr(error, "message", error)
        raise ConfigError(f"{where}: {reason}, got {value!r}") from None
    return words


def _meant(name: str, flags: dict[Any, Any]) -> str:
    close = difflib.get_close_matches(name, [str(flag) for flag in flags], n=1)
    return f"; did you mean {close[0]!r}?" if close else "; --help lists what there is"


class _Loader(yaml.SafeLoader):
    """YAML without its silent choice among equal keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            keys = [self.construct_object(key) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"{twice!r} occurs twice")
        return mapping
