"""The lock file: what was measured of each case, as text that is read in a diff and merged by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoaccum.guarding.cases import case_name
from autoaccum.guarding.records import Case, Measurement


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
    raise NotImplementedError


def write_lock(path: Path, lock: Lock, *, force: bool = False) -> None:
    """Write a lock, whole or not at all, with its holdings folded; equal locks are equal to the byte.

    Args:
        path: The file; a symbolic link stays one.
        lock: What to write.
        force: Whether to overwrite what cannot be read.

    Raises:
        LockFileError: What is there cannot be read, and `force` is not given.
        UsageError: It cannot be written there.
    """
    raise NotImplementedError
