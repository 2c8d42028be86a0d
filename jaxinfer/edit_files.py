"""Edits in a file, so that what one process found another one serves: one npz, nothing executed.

Arrays are stored as float32, and the rest of an edit as JSON beside them.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.edits import KINDS, Edit, no_edit
from jaxinfer.errors import InvalidRequestError

_INDEX = "edits"
_VERSION = 1


def save_edits(path: str | Path, edits: Edit | Sequence[Edit]) -> None:
    """Write edits, in the order in which they apply, for `load_edits` or `jaxinfer serve --edit`.

    Args:
        path: Of the file, which is replaced if it is there; its name is taken as it is.
        edits: Made by the functions of `jaxinfer.edits`, of concrete arrays.

    Raises:
        InvalidRequestError: There is none, or something else than edits.
    """
    several = [edits] if isinstance(edits, Edit) else list(edits)
    if not several or not all(isinstance(edit, Edit) for edit in several):
        raise no_edit(edits)
    records, arrays = [], {}
    for i, edit in enumerate(several):
        for role, value in edit.values.items():
            kind = np.int64 if role == "positions" else np.float32
            arrays[f"{i}.{role}"] = np.asarray(value).astype(kind)
        records.append(
            {"at": edit.at, "kind": edit.kind, "where": edit.where, "heads": edit.heads}
            | {"roles": list(edit.values)}
        )
    index = json.dumps({"version": _VERSION, "edits": records}, default=int)
    with Path(path).open("wb") as file:
        np.savez(file, **{_INDEX: np.array(index)}, **arrays)  # pyrefly: ignore[bad-argument-type]


def load_edits(path: str | Path) -> tuple[Edit, ...]:
    """Return the edits of a file that `save_edits` wrote.

    Raises:
        InvalidRequestError: It cannot be read, or holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            content = json.loads(str(file[_INDEX]))
            if content["version"] != _VERSION:
                raise InvalidRequestError(
                    f"{path} was written by another version of jaxinfer; save the edits again",
                    "edits",
                )
            return tuple(_edit(i, record, file) for i, record in enumerate(content["edits"]))
    except InvalidRequestError:
        raise
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise InvalidRequestError(
            f"{path} holds no edits: {error}; write it with jaxinfer.edit_files.save_edits", "edits"
        ) from error


def _edit(index: int, record: dict[str, Any], file: Any) -> Edit:
    if record["kind"] not in KINDS:
        raise ValueError(f"there is no kind {record['kind']!r}")
    where, heads = record["where"], record["heads"]
    return Edit(
        record["at"],
        record["kind"],
        {role: file[f"{index}.{role}"] for role in record["roles"]},
        tuple(where) if isinstance(where, list) else where,
        heads=None if heads is None else tuple(heads),
    )
