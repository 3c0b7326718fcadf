"""Where a child of another checkout of the user's repository finds its modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoaccum.errors import NotMeasuredError
from autoaccum.workload.module_names import split_reference

_OWN = Path(__file__).resolve().parents[1]
"""autoaccum measures with itself, whatever is checked out."""


@dataclass(frozen=True)
class Checkout:
    """Where a child works.

    Attributes:
        folder: Its current folder.
        original: The top of the user's repository, where `folder` lies in another checkout of it.
        root: The top of that checkout; None: `folder` is the user's own.
    """

    folder: Path
    original: Path | None = None
    root: Path | None = None

    def map_entry(self, entry: str) -> str:
        """An entry of `sys.path`, as the checkout has it; one that it has not stays, such as an environment's.

        So do an empty one, for the current folder, and a name that an editable installation has a hook for.
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
        """A variable such as `PYTHONPATH`, each entry for itself."""
        return os.pathsep.join(self.map_entry(entry) for entry in path.split(os.pathsep))

    def to_record(self) -> dict[str, str]:
        """What a child is told of where its modules have to lie; empty where they may lie anywhere."""
        return {} if self.root is None else {"original": str(self.original), "root": str(self.root)}


def check_loaded(reference: str, checkout: Mapping[str, str]) -> None:
    """See that a workload was loaded from its checkout (`Checkout.to_record`), with all of its modules there.

    Raises:
        NotMeasuredError: It would be compared with itself.
    """
    if not checkout:
        return
    original, root = Path(checkout["original"]), Path(checkout["root"])
    target, _, _ = split_reference(reference)
    workload = Path(getattr(sys.modules.get(target), "__file__", None) or target).resolve()
    astray = [] if workload.is_relative_to(root) else [workload]
    for module in list(sys.modules.values()):
        place = Path(getattr(module, "__file__", None) or "/").resolve()
        if place.is_relative_to(original) and not place.is_relative_to(root) and not place.is_relative_to(_OWN):
            astray += [place] if (root / place.relative_to(original)).exists() else []
    if astray:
        raise NotMeasuredError(
            f"{min(astray)} is loaded, and not from the revision that is to be measured",
            hint="have what is installed of this repository uninstalled, and its folders on PYTHONPATH",
        )
