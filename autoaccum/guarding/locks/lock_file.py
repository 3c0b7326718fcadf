"""The lock file: what was measured of each case, as text that is read in a diff and merged by hand."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from autoaccum.errors import LockFileError, MissingLockError
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.locks.lock_entries import find_wrong_sum, to_record
from autoaccum.guarding.locks.lock_reader import WaysOut, cut_off, is_cut, read_text
from autoaccum.guarding.locks.lock_text import lock_text
from autoaccum.guarding.locks.salvage import Salvage, salvage
from autoaccum.guarding.records import Case, Measurement
from autoaccum.planning.files import write_text


@dataclass(frozen=True)
class Lock:
    """What is locked.

    Attributes:
        entries: What was measured of each case, ordered by name.
    """

    entries: Mapping[Case, Measurement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ordered = dict(sorted(self.entries.items(), key=lambda entry: case_name(entry[0])))
        object.__setattr__(self, "entries", ordered)


def read_lock(path: Path, ways: WaysOut | None = None) -> Lock:
    """The lock in a file; its holdings are folded (`guarding.locks.folding`).

    Args:
        path: The file.
        ways: What messages offer.

    Raises:
        MissingLockError: There is none.
        LockFileError: It cannot be read, is damaged, half merged, of something else or of a newer autoaccum.
    """
    ways = ways or WaysOut()
    content = _read(path)
    if content is None:
        hint = f"write it by {ways.command('--update', named=ways.named)}"
        raise MissingLockError(f"there is no lock {path}", hint=hint)
    return Lock(_entries(content, path, ways))


def salvage_lock(path: Path, ways: WaysOut | None = None) -> Salvage:
    """What a lock says, as far as it can be told; nothing where there is none.

    Raises:
        LockFileError: Its content cannot be read at all, or it is cut off.
    """
    content = _read(path)
    if content is None:
        return Salvage()
    text = content.decode(errors="replace").replace("\r\n", "\n")
    if is_cut(text):
        raise cut_off(path, ways or WaysOut())
    return salvage(text)


def write_lock(path: Path, lock: Lock, *, force: bool = False) -> None:
    """Write a lock, whole or not at all, with its holdings folded; equal locks are equal to the byte.

    Args:
        path: The file; a symbolic link stays one.
        lock: What to write.
        force: Whether to overwrite what cannot be read.

    Raises:
        LockFileError: What is there cannot be read, and `force` is not given.
        UsageError: It cannot be written there.
        ValueError: A measurement does not add up.
    """
    for case, measurement in lock.entries.items():
        if wrong := find_wrong_sum(measurement):
            raise ValueError(f"the measurement of {case_name(case)} {wrong}")
    before = _read(path)
    if before is not None and not force:
        _entries(before, path, WaysOut())
    text = lock_text({case_name(case): to_record(case, found) for case, found in lock.entries.items()})
    if text.encode() != before:
        write_text(path, text, force=True)


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Within, no other guard reads and writes the locks of that folder; nothing is left behind in it."""
    descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # Some file systems have no locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _entries(content: bytes, path: Path, ways: WaysOut) -> dict[Case, Measurement]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        hint = ways.another if line == 1 else ways.anew
        raise LockFileError(f"{path}, line {line}, is not UTF-8", hint=hint) from None
    return read_text(text, path, ways)


def _read(path: Path) -> bytes | None:
    """What is in a file; None where there is none."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise LockFileError(f"{path} is no plain file", hint="name another by --lock")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise LockFileError(f"{path} is a folder", hint="name a file by --lock") from None
    except OSError as error:
        raise LockFileError(f"{path} cannot be read ({error.strerror})", hint="correct that, or name another") from None
    except ValueError as error:  # A null byte in its name.
        raise LockFileError(f"{str(path)!r} cannot be read ({error})", hint="name a file by --lock") from None
