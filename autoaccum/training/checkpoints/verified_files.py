"""Files of tensors that are whole, read back and safe to load, or not there at all."""

from __future__ import annotations

import errno
import os
import re
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config as saving

from autoaccum.accumulation.recovery import find_shortage
from autoaccum.errors import CheckpointError, first_line

_TEMPORARY = re.compile(r"\.(?:checkpoint-\d{8,}|model)\.pt\.\d+\.tmp")
_ZIP = b"PK\x03\x04"
_PARSING = (None, errno.EINVAL, errno.EOVERFLOW)
"""Of a file that was opened: what it says leads to places that no file has."""


class DamagedFileError(CheckpointError):
    """What is in the file is not what was written.

    Attributes:
        reason: How that was seen.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason})")
        self.reason = reason


def write_verified(path: Path, content: Any, is_whole: Callable[[Any], bool], *, checksums: bool = True) -> None:
    """Write `content` by `torch.save`, sync it, load it again, and only then give it its name.

    Until then nothing is changed: an earlier file of that name stays, and the temporary one beside it is removed.

    Args:
        path: The file.
        content: A nest that is portable.
        is_whole: Given what was loaded from the file.
        checksums: Have those that `unzip` looks at and `torch.load` does not; half of what writing takes.

    Raises:
        CheckpointError: It cannot be written, or does not read back as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            _save(file, content, checksums)
            os.fsync(file.fileno())
        if not _reads_back(temporary, is_whole):
            raise CheckpointError(f"{path} does not read back as it was written", hint="check the disk")
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def load_plain(path: Path, *, mapped: bool = False) -> Any:
    """What `torch.load` finds in a file, onto the CPU, without running anything that is in it.

    Args:
        path: The file.
        mapped: Leave tensors in the file until they are read; not for what lives longer than the file.

    Raises:
        DamagedFileError: It is no whole file of `torch.save`, or asks for more than values.
        CheckpointError: It cannot be read now.
    """
    if not is_file(path):
        raise CheckpointError(f"{path} cannot be read (it is no file)", hint="move it away")
    try:
        with path.open("rb") as file:
            begins = file.read(len(_ZIP))
    except OSError as error:
        raise _unreadable(path, error) from None
    if begins != _ZIP:
        raise DamagedFileError(path, "it is no file of torch.save")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What torch suspects of a file, the digest knows.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        if error.errno in _PARSING:
            raise DamagedFileError(path, "it is cut off, or its parts are not where it says") from None
        raise _unreadable(path, error) from None
    except Exception as error:
        if isinstance(error, MemoryError) or find_shortage(error) is not None:
            raise _too_large(path) from None
        raise DamagedFileError(path, _reason(error)) from None


def remove_leftovers(folder: Path) -> None:
    """Remove what a process that was killed had begun to write, from a folder that is known for a run's."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            with suppress(OSError):  # The next run tries again.
                path.unlink(missing_ok=True)


def is_file(path: Path) -> bool:
    """Not so for a folder, a pipe or a device; what cannot be looked at counts as one, and says so when it is read."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return True


def sync_folder(folder: Path) -> None:
    """Make names given in `folder` last, on file systems that can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class _Remembering:
    """A file that remembers why writing to it failed: torch's writer raises errors of its own after that."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:  # Linux writes 2 GiB at most, and what there is still room for.
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.failure = error
            raise
        return size

    def flush(self) -> None:
        self._file.flush()


def _save(file: Any, content: Any, checksums: bool) -> None:
    remembering = _Remembering(file)
    try:
        with saving.patch("save.compute_crc32", checksums):  # type: ignore[attr-defined]
            torch.save(content, remembering)  # type: ignore[arg-type]
    except Exception:
        if remembering.failure is None:
            raise
    if remembering.failure is not None:
        raise remembering.failure


def _reads_back(path: Path, is_whole: Callable[[Any], bool]) -> bool:
    try:
        return is_whole(_load_mapped(path))
    except DamagedFileError:
        return False


def _load_mapped(path: Path) -> Any:
    try:
        return load_plain(path, mapped=True)
    except DamagedFileError:
        # Some file systems cannot map files; a file that is damaged is so when it is read, too.
        return load_plain(path)


def _too_large(path: Path) -> CheckpointError:
    return CheckpointError(f"there is too little memory to load {path}", hint="free some")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOMEM:
        return _too_large(path)
    return CheckpointError(
        f"{path} cannot be read ({error.strerror or error})", hint="see that it can, or move it away"
    )


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    hint = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see that its folder can be written to"
    return CheckpointError(f"{path} cannot be written ({error.strerror or error})", hint=hint)


def _reason(error: Exception) -> str:
    """Without torch's advice to load the file in the way that runs code."""
    line = first_line(error)
    if line.startswith("Weights only load failed"):
        return "it holds more than values"
    return line.partition(". ")[0] or type(error).__name__
