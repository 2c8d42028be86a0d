"""Every error that reading, downloading or writing a checkpoint raises on purpose.

    CheckpointError (ValueError)
    ├── SourceNotFoundError         nothing is found under the given name
    │   └── DefaultModelMissingError    the package of the embedded default model is not installed
    ├── DownloadError               the hub refused, broke off or cannot be reached
    ├── MissingFileError            a part of the checkpoint is not there (config.json, a shard)
    ├── UnreadableFileError         the operating system refuses to open the file
    ├── FileFormatError             the bytes are not what the format promises
    │   ├── BadMagicError               another kind of file
    │   ├── UnsupportedVersionError     a version of the format that is not read here
    │   ├── TruncatedFileError          the file ends too early
    │   ├── CorruptFileError            the file contradicts itself
    │   ├── UnsupportedDtypeError       a tensor in a number format that is not read here
    │   └── DuplicateTensorError        one name, two tensors
    ├── UnknownArchitectureError    a sound file of a model family that is not known here
    ├── UnknownTensorError          no tensor of this name
    ├── TreeMismatchError           what is stored and what is asked for differ (all faults listed)
    ├── DestinationExistsError      writing would overwrite something
    ├── WriteError                  writing failed, nothing was left behind
    └── NoSpaceError                the disk is full

Each message says what was expected, what was found and what to do.
"""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class CheckpointError(ValueError):
    """Base of every error of this package."""


class SourceNotFoundError(CheckpointError):
    """No file, folder, installed package or hub model has this name."""


class DefaultModelMissingError(SourceNotFoundError):
    """No model was named and the package of the embedded default is not installed."""


class DownloadError(CheckpointError):
    """A model could not be fetched from the hub; nothing half-written is used later."""


class MissingFileError(CheckpointError):
    """A file that the checkpoint refers to does not exist."""


class UnreadableFileError(CheckpointError):
    """The operating system does not let us read the file."""


class FileFormatError(CheckpointError):
    """The bytes of a file are not what its format promises."""


class BadMagicError(FileFormatError):
    """The file is of another kind than its name claims."""


class UnsupportedVersionError(FileFormatError):
    """A version of the format that this package does not read."""


class TruncatedFileError(FileFormatError):
    """The file ends before its header says it should."""


class CorruptFileError(FileFormatError):
    """The file contradicts itself or the limits of its format."""


class UnsupportedDtypeError(FileFormatError):
    """A tensor is stored in a number format that this package does not read."""


class DuplicateTensorError(FileFormatError):
    """Two tensors carry the same name."""


class UnknownArchitectureError(CheckpointError):
    """The file is sound, but its model family is not known here."""


class UnknownTensorError(CheckpointError):
    """The checkpoint has no tensor of the given name."""


class TreeMismatchError(CheckpointError):
    """A stored tree and the tree asked for differ.

    Attributes:
        missing: Names asked for that are not stored.
        unexpected: Names stored that nobody asked for.
        misshapen: Name → (shape asked for, shape stored).
    """

    def __init__(
        self,
        message: str,
        *,
        missing: list[str],
        unexpected: list[str],
        misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
    ):
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.misshapen = misshapen


class DestinationExistsError(CheckpointError):
    """The place to write to is taken."""


class WriteError(CheckpointError):
    """A checkpoint could not be written; the destination is as it was before."""


class NoSpaceError(CheckpointError):
    """The disk is full; the destination is as it was before."""


def is_no_space(error: BaseException | None) -> bool:
    """Whether a full disk or quota is at the bottom of `error`, however it was wrapped."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # Orbax's C++ layer reports the errno only as text.
        text = str(error)
        if "No space left on device" in text or "Disk quota exceeded" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def readable(path: Path) -> Generator[None, None, None]:
    """Turn what the operating system says about opening `path` into a `CheckpointError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{path} does not exist; check the name, or fetch the missing file again"
        ) from error
    except OSError as error:
        raise UnreadableFileError(
            f"{path} cannot be read ({error.strerror or error}); check its permissions"
        ) from error
