"""A file that grows by whole pieces."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path


class AppendedFile:
    """Appends each piece at once, whole or not at all; after a failure (a full disk) it can be tried again.

    Args:
        path: The file; it is opened when there is something to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def write(self, piece: bytes) -> None:
        """Append `piece`.

        Raises:
            OSError: It could not be written; no part of it is there.
        """
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            _append(self._file, piece)
        except OSError:
            with suppress(OSError):
                self.close()
            raise

    def close(self) -> None:
        """Close the file; a later piece opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def _append(file: io.FileIO, piece: bytes) -> None:
    end = file.seek(0, io.SEEK_END)
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise
