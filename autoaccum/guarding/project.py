"""The folder that a guard is about: what `pyproject.toml` says of it, and where its lock lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autoaccum.guarding.records import Case
from autoaccum.guarding.tolerance import Tolerance

LOCK_NAME = "autoaccum.lock"


@dataclass(frozen=True, kw_only=True)
class Project:
    """What is guarded in a folder.

    Attributes:
        folder: Absolute; workloads are relative to it, and children run in it.
        lock: The lock file, absolute; it need not be there.
        tolerance: Of `[tool.autoaccum]`; None where that says none.
        cases: What `[tool.autoaccum]` names, in its order.
    """

    folder: Path
    lock: Path
    tolerance: Tolerance | None = None
    cases: tuple[Case, ...] = ()


def find_project(cwd: Path, lock: str | None = None) -> Project:
    """The project that `cwd` lies in.

    Its folder is that of the nearest `pyproject.toml` with a `[tool.autoaccum]`, else that of the nearest lock, from
    `cwd` upwards, else `cwd` itself.

    Args:
        cwd: The current folder.
        lock: Another lock than the project's, relative to `cwd`.

    Raises:
        UsageError: `[tool.autoaccum]` says what cannot be honoured, or its file cannot be read.
    """
    raise NotImplementedError
