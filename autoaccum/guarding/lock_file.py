"""The lock file: what was measured of each case, as text that is read in a diff and merged by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoaccum.errors import LockFileError, MissingLockError
from autoaccum.guarding.cases import case_name
from autoaccum.guarding.lock_entries import find_wrong_sum, to_record
from autoaccum.guarding.lock_reader import ANEW, ANOTHER, read_text, salvage_cases
from autoaccum.guarding.lock_text import lock_text
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


def read_lock(path: Path) -> Lock:
    """The lock in a file; its holdings are folded (`guarding.folding`).

    Raises:
        MissingLockError: There is none.
        LockFileError: It cannot be read, is damaged, half merged, of something else or of a newer autoaccum.
    """
    text = _read(path)
    if text is None:
        raise MissingLockError(f"there is no lock {path}", hint="write it by `autoaccum guard --update`")
    return Lock(read_text(text, path))


def read_names(path: Path) -> tuple[Case, ...]:
    """The cases that a lock names, even one that cannot be read, as far as they can be told."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ()
    return tuple(dict.fromkeys(salvage_cases(text)))


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
    before = None if force else _read(path)
    if before is not None:
        read_text(before, path)
    text = lock_text({case_name(case): to_record(case, found) for case, found in lock.entries.items()})
    if text != before:
        write_text(path, text, force=True)


def _read(path: Path) -> str | None:
    """The text of a file; None where there is none."""
    try:
        return path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise LockFileError(f"{path} is a folder", hint="name a file by --lock") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise LockFileError(f"{path}, line {line}, is not UTF-8", hint=ANOTHER if line == 1 else ANEW) from None
    except OSError as error:
        raise LockFileError(f"{path} cannot be read ({error.strerror})", hint="correct that, or name another") from None
    except ValueError as error:  # A null byte in its name.
        raise LockFileError(f"{str(path)!r} cannot be read ({error})", hint="name a file by --lock") from None
