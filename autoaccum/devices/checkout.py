"""Where the modules of a child lie: in the user's folder, or in another checkout of the same repository."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_OWN = str(Path(__file__).resolve().parents[1])
"""autoaccum measures with itself, whatever is checked out."""

_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = ("site-packages", "dist-packages")


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
        place = os.path.realpath(entry)
        if self.original is None or not is_original(place, str(self.original), str(self.root)):
            return str(Path(entry).absolute())
        return str(self.root / Path(place).relative_to(self.original))

    def map_path(self, path: str) -> str:
        """A variable such as `PYTHONPATH`, each entry for itself."""
        return os.pathsep.join(self.map_entry(entry) for entry in path.split(os.pathsep))

    def to_record(self) -> dict[str, str]:
        """What a child needs to tell what is imported from elsewhere; empty where nothing can be."""
        return {} if self.original is None else {"original": str(self.original), "root": str(self.root)}


def redirect_hooks(record: Mapping[str, Any]) -> None:
    """Have editable installations of setuptools lead to the checkout, too.

    Of a package beside others they put no folder on `sys.path`: a module that Python imports as it starts has a table
    of where packages lie (`MAPPING` and `NAMESPACES`, setuptools/command/editable_wheel.py).

    Args:
        record: Of `Checkout.to_record`.
    """
    if not record:
        return
    original, root = record["original"], record["root"]
    for name, module in list(sys.modules.items()):
        mapping, namespaces = getattr(module, "MAPPING", None), getattr(module, "NAMESPACES", None)
        if not name.startswith("__editable__") or not isinstance(mapping, dict) or not isinstance(namespaces, dict):
            continue
        mapping.update({package: _redirected(path, original, root) for package, path in mapping.items()})
        namespaces.update(
            {package: [_redirected(path, original, root) for path in paths] for package, paths in namespaces.items()}
        )


def is_original(place: str, original: str, root: str) -> bool:
    """Whether a file or folder, all links followed, is one of the user's repository that a revision has its own of.

    Neither autoaccum's own are, nor those of an environment that lies in the repository, unless they are in the
    revision too.

    Args:
        place: The path.
        original: The top of the user's repository.
        root: The top of what is checked out.
    """
    if not is_within(place, original) or is_within(place, root) or is_within(place, _OWN):
        return False
    if f"{place}/".startswith(_libraries()):
        return False
    inside = f"{place}/"[len(original) :]
    return not any(f"/{name}/" in inside for name in _INSTALLED) or os.path.lexists(root + inside.rstrip("/"))


def is_within(place: str, folder: str) -> bool:
    """Whether a path is that of a folder or of something in it."""
    return f"{place}/".startswith(f"{folder.rstrip('/')}/")


def _redirected(path: str, original: str, root: str) -> str:
    place = os.path.realpath(path)
    return root + place[len(original) :] if is_original(place, original, root) else path


@cache
def _libraries() -> tuple[str, ...]:
    """The folders of Python itself and of what is installed, as they are called and as they really are."""
    folders = [sysconfig.get_path(name) for name in _LIBRARIES]
    return tuple(f"{folder}/" for folder in {*folders, *map(os.path.realpath, folders)})
