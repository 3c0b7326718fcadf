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


@dataclass(frozen=True)
class Checkout:
    """The folder that a child works in, and the checkout of the user's repository that it belongs to.

    Attributes:
        folder: The current folder of the child.
        original: The top of the user's repository, if `folder` is in another checkout of it.
        root: The top of that checkout; None: `folder` is in the user's own.
    """

    folder: Path
    original: Path | None = None
    root: Path | None = None

    def map_entry(self, entry: str) -> str:
        """Return the entry of `sys.path` in the checkout; an entry that the checkout lacks stays as it is.

        An empty entry (the current folder) stays, too, and so does the name of an editable installation's hook.
        """
        if not entry or not (entry.startswith("/") or Path(entry).exists()):
            return entry
        place = Path(entry).resolve()
        if self.original is not None and self.root is not None and place.is_relative_to(self.original):
            there = self.root / place.relative_to(self.original)
            if there.exists():
                return str(there)
        return str(Path(entry).absolute())

    def map_path(self, path: str) -> str:
        """Map every entry of a variable such as `PYTHONPATH`."""
        return os.pathsep.join(self.map_entry(entry) for entry in path.split(os.pathsep))


@dataclass(frozen=True, kw_only=True)
class ImportPaths:
    """The folders in which a process finds modules and files; `original` and `root` as in `Checkout`."""

    cwd: str
    sys_path: tuple[str, ...]
    pythonpath: str | None
    original: str | None = None
    root: str | None = None

    @classmethod
    def of(cls, checkout: Checkout | None = None) -> ImportPaths:
        """Return those of a checkout; None: of this process."""
        checkout = checkout or Checkout(Path.cwd())
        pythonpath = os.environ.get("PYTHONPATH")
        return cls(
            cwd=str(checkout.folder),
            sys_path=tuple(checkout.map_entry(entry) for entry in sys.path),
            pythonpath=None if pythonpath is None else checkout.map_path(pythonpath),
            original=None if checkout.original is None else str(checkout.original),
            root=None if checkout.root is None else str(checkout.root),
        )

    def use(self) -> None:
        """Make them those of this process."""
        sys.path[:] = self.sys_path
        os.chdir(self.cwd)
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
