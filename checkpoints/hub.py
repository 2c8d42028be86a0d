"""Fetch a model from the Hugging Face hub into its cache: only the files that are needed.

All network and cache work is `huggingface_hub`'s, which honours `HF_ENDPOINT`, `HF_HOME` and
`HF_TOKEN`, writes to `*.incomplete` files and renames. Opens no checkpoint.
"""

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import (
    CheckpointError,
    DownloadError,
    NoSpaceError,
    SourceNotFoundError,
    is_no_space,
)

# What there may be beside the weights and is read here.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_WEIGHTS = (".safetensors", ".gguf")
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
# The model in another layout, or not the model.
_NOT_THE_MODEL = ("consolidated", "adapter_model")

_CONNECT_TIMEOUT_S = 10.0

_REFERENCE = re.compile(
    r"(?P<repo_id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:\s]+))?(?::(?P<file>\S+))?"
)


@dataclass(frozen=True)
class HubReference:
    """A model on the hub, written `owner/name[@revision][:file]`.

    Attributes:
        repo_id: `owner/name`.
        revision: Branch, tag or commit; None is the default branch.
        file: Part of the name of the one GGUF file wanted, such as `Q4_K_M`.
    """

    repo_id: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubReference | None":
        """The reference that `text` spells, or None if it cannot be one."""
        match = _REFERENCE.fullmatch(text)
        # "./x" and "../x" are paths, whatever else they look like.
        if match is None or text.startswith("."):
            return None
        return cls(**match.groupdict())


def fetch(reference: HubReference, cache_dir: Path | None = None) -> Path:
    """The local path of the model, downloaded if the cache does not hold it.

    Returns:
        A folder with safetensors, or one GGUF file.

    Raises:
        SourceNotFoundError: The hub has no such model, revision or file.
        DownloadError: The hub cannot be reached, refuses, or broke off.
        NoSpaceError: The disk is full.
    """
    # Imported late: only those who name a hub model should wait for it.
    import huggingface_hub

    def download(patterns: list[str]) -> str:
        return huggingface_hub.snapshot_download(
            reference.repo_id,
            revision=reference.revision,
            cache_dir=cache_dir,
            allow_patterns=patterns,
        )

    with _hub_errors(reference):
        api = huggingface_hub.HfApi()
        try:
            # Not `list_repo_files`: it tries for 25 s before it admits that there is no network.
            info = api.model_info(
                reference.repo_id, revision=reference.revision, timeout=_CONNECT_TIMEOUT_S
            )
        except Exception as error:
            if _answered(error):
                raise
            # No connection: what an earlier run has fetched completely is as good.
            if (cached := _from_cache(reference, cache_dir)) is not None:
                return cached
            raise
        names = [sibling.rfilename for sibling in info.siblings or ()]
        patterns, file = _choose(reference, names)
        # Weights last: where they are whole after an interruption, everything else is there.
        small = [name for name in patterns if not name.endswith(_WEIGHTS)]
        if small:
            download(small)
        folder = Path(download(patterns))
        return folder / file if file else folder


def _choose(reference: HubReference, names: list[str]) -> tuple[list[str], str | None]:
    """The files to fetch and, for GGUF, the one that is the model."""
    top = [name for name in names if "/" not in name]
    safetensors = [
        name
        for name in top
        if name.endswith((".safetensors", ".safetensors.index.json"))
        and not name.startswith(_NOT_THE_MODEL)
    ]
    if safetensors and reference.file is None:
        return [*safetensors, *(name for name in SMALL_FILES if name in top)], None
    ggufs = [name for name in names if name.endswith(".gguf")]
    wanted = [name for name in ggufs if (reference.file or "").lower() in name.lower()]
    exact = [name for name in wanted if name == reference.file]
    wanted = exact or wanted
    if len(wanted) == 1:
        return wanted, wanted[0]
    if not ggufs:
        raise SourceNotFoundError(
            f"{reference.repo_id} holds neither safetensors nor GGUF weights; "
            "choose a repository of the same model that does"
        )
    listing = ", ".join(wanted or ggufs)
    found = f"{len(wanted)} of them match" if reference.file else f"it holds {len(ggufs)}"
    raise SourceNotFoundError(
        f"expected one GGUF file in {reference.repo_id}, {found}: {listing}; "
        f"name one, as in {reference.repo_id}:{(wanted or ggufs)[0]}"
    )


def _from_cache(reference: HubReference, cache_dir: Path | None) -> Path | None:
    import huggingface_hub

    for patterns in ([*_SAFETENSORS, *SMALL_FILES], ["*.gguf"]):
        try:
            folder = huggingface_hub.snapshot_download(
                reference.repo_id,
                revision=reference.revision,
                cache_dir=cache_dir,
                allow_patterns=patterns,
                local_files_only=True,
            )
        # "Nothing cached" and "cached in part" have different types in different versions.
        except (OSError, ValueError):
            continue
        root = Path(folder)
        names = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*")) if p.is_file()]
        if any(name.endswith(_WEIGHTS) for name in names) and _has_all_shards(root, names):
            _, file = _choose(reference, names)
            return root / file if file else root
    return None


def _has_all_shards(folder: Path, names: list[str]) -> bool:
    """Whether no shard is missing; files are fetched side by side, and the cache may not tell."""
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if not indices and any(_SHARD.search(name) for name in names):
        return False
    return all(
        shard in names
        for index in indices
        for shard in json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
    )


def _answered(error: Exception) -> bool:
    """Whether the hub itself said no, as opposed to not being reached or being out of order."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and 400 <= status < 500


@contextmanager
def _hub_errors(reference: HubReference) -> Generator[None, None, None]:
    from huggingface_hub import errors

    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"the hub lets only approved accounts fetch {reference.repo_id}; ask for access on its "
            "page, then log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceNotFoundError(
            f"{reference.repo_id} has no revision {reference.revision!r}; leave out "
            "@revision for the default branch"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SourceNotFoundError(
            f"no file or folder {reference.repo_id!r} exists here and the hub has no model of that "
            "name (or it is private: log in with `hf auth login`); check the spelling"
        ) from error
    # The transport's error types change with huggingface_hub's version (requests, httpx, …).
    except Exception as error:
        if is_no_space(error):
            raise NoSpaceError(
                f"the disk ran full while fetching {reference.repo_id}; free some space, or "
                "set HF_HOME to a folder on another disk"
            ) from error
        raise DownloadError(_explain(reference, error)) from error


def _explain(reference: HubReference, error: Any) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return (
        f"{reference.repo_id} could not be fetched from the hub ({type(error).__name__}: {reason})."
        " Check the connection and run it again: it continues where it stopped. "
        "A local file or folder can be given instead"
    )
