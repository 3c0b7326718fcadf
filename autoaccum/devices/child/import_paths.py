"""Paths on which a child finds modules: those of its parent, or of another checkout of the user's repository."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import autoaccum
from autoaccum.errors import NotMeasuredError
from autoaccum.sources.module_names import module_files

_OWN = Path(autoaccum.__file__).resolve().parent
"""autoaccum's own modules, which are never taken from a checkout."""


@dataclass(frozen=True, kw_only=True)
class ImportPaths:
    """The folders in which a process finds modules and files.

    Attributes:
        folder: The current folder.
        sys_path: The entries of `sys.path`.
        pythonpath: The variable `PYTHONPATH`; None if it is not set.
        original: The top of the user's repository, if `folder` is in another checkout of it.
        root: The top of that checkout; None: `folder` is in the user's own.
    """

    folder: str
    sys_path: tuple[str, ...]
    pythonpath: str | None
    original: str | None = None
    root: str | None = None

    @classmethod
    def of(cls, folder: Path | None = None, *, original: Path | None = None, root: Path | None = None) -> ImportPaths:
        """Return those of this process, in another folder or another checkout where these are given."""

        def map_entry(entry: str) -> str:
            # An empty entry is the current folder; others name no folder, but an editable installation's hook.
            if not entry or not (entry.startswith("/") or Path(entry).exists()):
                return entry
            place = Path(entry).resolve()
            if original is not None and root is not None and place.is_relative_to(original):
                there = root / place.relative_to(original)
                if there.exists():  # What the checkout lacks, such as an environment, stays.
                    return str(there)
            return str(Path(entry).absolute())

        pythonpath = os.environ.get("PYTHONPATH")
        return cls(
            folder=str(folder or Path.cwd()),
            sys_path=tuple(map(map_entry, sys.path)),
            pythonpath=pythonpath and os.pathsep.join(map(map_entry, pythonpath.split(os.pathsep))),
            original=None if original is None else str(original),
            root=None if root is None else str(root),
        )

    def use(self) -> None:
        """Make them those of this process."""
        sys.path[:] = self.sys_path
        os.chdir(self.folder)
        if self.pythonpath is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self.pythonpath

    def check_loaded(self, workload: Path | None) -> None:
        """Check that a workload's file and modules were loaded from the checkout of its repository, where one is used.

        Raises:
            NotMeasuredError: A module comes from elsewhere, so that a revision would be compared with itself.
        """
        if self.original is None or self.root is None:
            return
        original, root = Path(self.original), Path(self.root)
        astray = [] if workload is None or workload.is_relative_to(root) else [workload]
        for module in list(sys.modules.values()):
            place = Path((module_files(module) or ["/"])[0]).resolve()
            if place.is_relative_to(original) and not place.is_relative_to(root) and not place.is_relative_to(_OWN):
                astray += [place] if (root / place.relative_to(original)).exists() else []
        if astray:
            raise NotMeasuredError(
                f"{min(astray)} is loaded, and not from the revision that is to be measured",
                hint="have what is installed of this repository uninstalled, and its folders on PYTHONPATH",
            )
