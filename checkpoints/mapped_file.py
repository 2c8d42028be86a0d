"""A read-only memory map with bounds: bytes and arrays at offsets, never past the end.

Knows no file format.
"""

import mmap
from pathlib import Path

import numpy as np

from checkpoints.errors import TruncatedFileError, readable


class MappedFile:
    """The bytes of one file. Views handed out keep the mapping alive after `close`."""

    def __init__(self, path: Path):
        """Map `path`.

        Raises:
            MissingFileError, UnreadableFileError: It cannot be opened.
            TruncatedFileError: It is empty.
        """
        self.path = path
        with readable(path), open(path, "rb") as file:
            self.size = file.seek(0, 2)
            if self.size == 0:
                raise TruncatedFileError(f"{path} is empty (0 bytes); fetch the file again")
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._previous: tuple[int, int] | None = None

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """A read-only uint8 view of `[offset, offset + nbytes)`, a range the caller has checked."""
        self._release_previous()
        self._previous = (offset, nbytes)
        return np.frombuffer(self.buffer, np.uint8, count=nbytes, offset=offset)

    def close(self) -> None:
        """Drop the mapping, once the last view of it is gone."""
        self._previous = None
        del self.buffer

    def _release_previous(self) -> None:
        # Pages already touched count as our memory until the kernel wants them back: without this,
        # loading a model would look as if it needed the file and the arrays at once. Views stay
        # valid: a page touched again is read from the page cache again.
        previous, self._previous = self._previous, None
        if previous is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        offset, nbytes = previous
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self.buffer.madvise(mmap.MADV_DONTNEED, start, stop - start)
