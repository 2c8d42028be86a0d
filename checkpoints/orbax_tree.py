"""Save and restore a flat dict of arrays with Orbax, straight from and into their shardings.

A saved folder holds `jaxinfer.json` (names, shapes, dtypes and the caller's metadata), the Orbax
folder `arrays/`, and text files given by the caller. A folder appears whole or not at all. Knows no
model: the names are the caller's own.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints.checkpoint import TensorInfo
from checkpoints.errors import (
    CorruptFileError,
    DestinationExistsError,
    MissingFileError,
    NoSpaceError,
    TreeMismatchError,
    UnsupportedVersionError,
    WriteError,
    is_no_space,
)
from checkpoints.folder_files import read_json

if TYPE_CHECKING:
    import jax

MANIFEST = "jaxinfer.json"
ARRAYS = "arrays"
FORMAT, VERSION = "jaxinfer-orbax", 1


def is_orbax(path: Path) -> bool:
    """Whether `path` is a folder written by `save_tree`."""
    return (path / MANIFEST).is_file()


def save_tree(
    path: Path,
    arrays: Mapping[str, "jax.Array | np.ndarray"],
    metadata: Mapping[str, Any] | None = None,
    text_files: Mapping[str, str] | None = None,
) -> None:
    """Write `arrays` to the new folder `path`, completely or not at all.

    Args:
        path: Must not exist; its parent is made if needed.
        arrays: By name; sharded arrays are written shard by shard.
        metadata: JSON values for `read_metadata`.
        text_files: File name → content, such as `tokenizer.json`.

    Raises:
        DestinationExistsError: Something is at `path` already.
        NoSpaceError: The disk is full.
        WriteError: Writing failed for another reason.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise DestinationExistsError(f"{path} exists already; remove it or choose another name")
    manifest = _manifest(arrays, metadata or {})
    staging: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_free(path, sum(a.nbytes for a in arrays.values()))
        # A sibling, so that the rename at the end stays within one file system and is atomic.
        staging = Path(
            tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        )
        staging.chmod(0o755)
        _write_arrays(staging / ARRAYS, arrays)
        for name, content in (text_files or {}).items():
            (staging / name).write_text(content, encoding="utf-8")
        (staging / MANIFEST).write_text(manifest, encoding="utf-8")
        staging.rename(path)
    except BaseException as error:  # also on Ctrl-C: nothing half-written stays
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        if is_no_space(error) and not isinstance(error, NoSpaceError):
            raise NoSpaceError(
                f"the disk ran full while writing {path}; nothing was left behind. "
                "Free some space or choose another disk"
            ) from error
        if isinstance(error, OSError):
            raise WriteError(
                f"{path} could not be written ({error.strerror or error}); "
                "nothing was left behind. Check the path and its permissions"
            ) from error
        raise


def restore_tree(
    path: Path, targets: Mapping[str, "jax.ShapeDtypeStruct"]
) -> dict[str, "jax.Array"]:
    """Read the arrays of `targets`, each straight into its sharding and dtype.

    Args:
        path: A folder written by `save_tree`.
        targets: Name → shape, dtype and sharding (None: one default device). All names stored must
            be asked for; a dtype that differs from the stored one is cast on reading.

    Raises:
        TreeMismatchError: Names or shapes differ; all differences are listed.
        CorruptFileError: The folder is damaged.
    """
    path = Path(path)
    _check_tree(path, read_infos(path), targets)
    if not (path / ARRAYS).is_dir():
        raise MissingFileError(f"{path} has no folder {ARRAYS}/; convert the model again")
    return _read_arrays(path / ARRAYS, targets)


def read_metadata(path: Path) -> dict[str, Any]:
    """The `metadata` that was given to `save_tree`."""
    return _read_manifest(path)["metadata"]


def read_infos(path: Path) -> dict[str, TensorInfo]:
    """Name → shape and dtype of every stored array, without reading any."""
    try:
        return {
            name: TensorInfo(tuple(entry["shape"]), entry["dtype"], entry["nbytes"])
            for name, entry in _read_manifest(path)["arrays"].items()
        }
    except (TypeError, KeyError) as error:
        raise _damaged(path) from error


def _manifest(arrays: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    infos = {
        name: {"shape": list(a.shape), "dtype": np.dtype(a.dtype).name, "nbytes": int(a.nbytes)}
        for name, a in arrays.items()
    }
    content = {"format": FORMAT, "version": VERSION, "metadata": dict(metadata), "arrays": infos}
    return json.dumps(content, indent=1)


def _read_manifest(path: Path) -> dict[str, Any]:
    if not is_orbax(Path(path)):
        raise MissingFileError(
            f"{path} has no {MANIFEST}: it was not written by jaxinfer, or is damaged; "
            "convert the model again"
        )
    manifest = read_json(Path(path) / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise UnsupportedVersionError(
            f"{path}: expected {FORMAT} version {VERSION}, got {manifest.get('format')!r} "
            f"version {manifest.get('version')!r}; convert the model again"
        )
    if not isinstance(manifest.get("arrays"), dict) or not isinstance(
        manifest.get("metadata"), dict
    ):
        raise _damaged(path)
    return manifest


def _damaged(path: Path) -> CorruptFileError:
    return CorruptFileError(f"{path}/{MANIFEST} is damaged; convert the model again")


def _check_free(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise NoSpaceError(
            f"{path} needs {nbytes / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB are free there; "
            "free some space or choose another disk"
        )


def _check_tree(
    path: Path, stored: Mapping[str, TensorInfo], targets: Mapping[str, "jax.ShapeDtypeStruct"]
) -> None:
    missing = [name for name in targets if name not in stored]
    unexpected = [name for name in stored if name not in targets]
    misshapen = {
        name: (tuple(target.shape), stored[name].shape)
        for name, target in targets.items()
        if name in stored and tuple(target.shape) != stored[name].shape
    }
    faults = [f"missing {name}" for name in missing]
    faults += [f"unexpected {name}" for name in unexpected]
    faults += [
        f"{name} has shape {list(got)}, expected {list(expected)}"
        for name, (expected, got) in misshapen.items()
    ]
    if faults:
        raise TreeMismatchError(
            f"{path} does not fit the model ({len(faults)} faults): {'; '.join(faults)}. "
            "Convert the model again",
            missing=missing,
            unexpected=unexpected,
            misshapen=misshapen,
        )


def _write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    # Importing Orbax takes a second, which only those who use it should pay.
    import orbax.checkpoint as ocp

    with _without_tracebacks(), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), dict(arrays))


def _read_arrays(
    folder: Path, targets: Mapping[str, "jax.ShapeDtypeStruct"]
) -> dict[str, "jax.Array"]:
    import jax
    import orbax.checkpoint as ocp

    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            dtype=target.dtype,
            sharding=getattr(target, "sharding", None) or default,
            global_shape=tuple(target.shape),
        )
        for name, target in targets.items()
    }
    with _without_tracebacks(), ocp.PyTreeCheckpointer() as checkpointer:
        try:
            return checkpointer.restore(
                folder.absolute(), item=dict(targets), restore_args=restore_args
            )
        # Orbax and its C++ layer have no error type of their own for a damaged file.
        except (ValueError, KeyError, OSError) as error:
            raise CorruptFileError(
                f"{folder} is damaged ({str(error).splitlines()[0]:.200}); convert the model again"
            ) from error


@contextmanager
def _without_tracebacks() -> Generator[None, None, None]:
    # Orbax logs the stack of a failing background thread and then raises the same error here,
    # where it becomes a message for people.
    def is_no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger = logging.getLogger("absl")
    logger.addFilter(is_no_error)
    try:
        yield
    finally:
        logger.removeFilter(is_no_error)
