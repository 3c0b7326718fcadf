"""Where the modules of a child lie: in the user's folder, or in another checkout of the same repository."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from autoaccum.errors import NotMeasuredError

_OWN = Path(__file__).resolve().parents[1]
"""autoaccum measures with itself, whatever is checked out."""

_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")


@dataclass(frozen=True)
class Checkout:
    """Where a child works.

    Attributes:
        folder: Its current folder.
        original: The top of the user's repository, where `folder` lies in another checkout of it: what is imported from
            within is imported from the checkout instead. None: `folder` is the user's own.
        top: The top of that checkout; None: `folder`.
    """

    folder: Path
    original: Path | None = None
    top: Path | None = None

    @property
    def root(self) -> Path:
        """The top of what is checked out."""
        return self.folder if self.top is None else self.top

    def map_entry(self, entry: str) -> str:
        """An entry of `sys.path`, where it is to be looked for; one of the environment's stays.

        An empty one stays, too: it is the current folder, whichever that is. So does what is no path, but a name that
        an editable installation has a hook for.
        """
        if not entry or not (entry.startswith("/") or Path(entry).exists()):
            return entry
        place = Path(os.path.realpath(entry))
        if self.original is None:
            return str(Path(entry).absolute())
        if not _is_within(place, self.original) or _is_within(place, self.root) or _is_library(str(place)):
            return str(Path(entry).absolute())
        return str(self.root / place.relative_to(self.original))

    def map_path(self, path: str) -> str:
        """A variable such as `PYTHONPATH`, each entry for itself."""
        return os.pathsep.join(self.map_entry(entry) for entry in path.split(os.pathsep))

    def to_record(self) -> dict[str, str]:
        """What a child needs to tell what is imported from elsewhere; empty where nothing can be."""
        return {} if self.original is None else {"original": str(self.original), "root": str(self.root)}


def check_imports(record: Mapping[str, Any], modules: Iterable[tuple[str, ModuleType]] | None = None) -> None:
    """Refuse what was imported from the user's folders though another checkout of them is to be measured.

    Args:
        record: Of `Checkout.to_record`.
        modules: Names and modules; None: all that are imported.

    Raises:
        NotMeasuredError: A module lies there, as one does that an editable installation leads to.
    """
    if not record:
        return
    original, root = Path(record["original"]), Path(record["root"])
    for name, module in list(sys.modules.items()) if modules is None else modules:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.startswith("/") or _is_library(file):
            continue  # An import makes it absolute; torch.ops says `_ops.py`.
        place = Path(os.path.realpath(file))
        if _is_within(place, original) and not any(_is_within(place, other) for other in (root, _OWN)):
            above = len(name.split(".")) + (place.stem == "__init__")
            raise NotMeasuredError(
                f"{name} is imported from {place}, not from the revision that is to be measured,"
                " as an editable installation has it",
                hint=f"set PYTHONPATH={_parent(place, above)}, or install it with"
                " `pip install -e . --config-settings editable_mode=compat`",
            )


def redirect_hooks(record: Mapping[str, Any]) -> None:
    """Have editable installations of setuptools lead to the checkout, too.

    Of a package beside others they put no folder on `sys.path`: a module that Python imports as it starts has a table
    of where packages lie (`MAPPING` and `NAMESPACES`, setuptools/command/editable_wheel.py).

    Args:
        record: Of `Checkout.to_record`.
    """
    if not record:
        return
    original, root = Path(record["original"]), Path(record["root"])
    for name, module in list(sys.modules.items()):
        mapping, namespaces = getattr(module, "MAPPING", None), getattr(module, "NAMESPACES", None)
        if not name.startswith("__editable__") or not isinstance(mapping, dict) or not isinstance(namespaces, dict):
            continue
        mapping.update({package: _redirected(path, original, root) for package, path in mapping.items()})
        namespaces.update(
            {package: [_redirected(path, original, root) for path in paths] for package, paths in namespaces.items()}
        )


def _redirected(path: str, original: Path, root: Path) -> str:
    place = Path(os.path.realpath(path))
    if place == _OWN or not _is_within(place, original) or _is_within(place, root):
        return path
    return str(root / place.relative_to(original))


def _parent(place: Path, levels: int) -> Path:
    return place.parents[min(levels, len(place.parents)) - 1]


def _is_within(place: Path, folder: Path) -> bool:
    return place == folder or folder in place.parents


def _is_library(file: str) -> bool:
    """Whether a file or folder belongs to an environment, which may lie in the repository."""
    return any(name in file for name in ("/site-packages", "/dist-packages")) or f"{file}/".startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    """The folders of Python itself and of what is installed, as they are called and as they really are."""
    folders = [sysconfig.get_path(name) for name in _LIBRARIES]
    return tuple(f"{folder}/" for folder in {*folders, *map(os.path.realpath, folders)})
