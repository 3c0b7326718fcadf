"""Code of the user's own folders that a child loads though another checkout of them is to be measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

from autoaccum.devices.checkout import is_original, is_within
from autoaccum.errors import NotMeasuredError

_HEARD = ("open", "exec", "import", "ctypes.dlopen")
_CODE = (".py", ".pyc", ".so", ".cpp", ".cu")
_AGAIN = "and name a revision that has it so"


class Strays:
    """Hears of the first file of code that this process loads from the user's repository instead of the checkout.

    Or has loaded: what is imported already counts. It listens for as long as the process lives (an audit hook cannot be
    removed, PEP 578), so make one only in a child of another checkout, before it loads anything. What other processes
    load that the workload starts, it does not hear.

    What is heard are files of code that are opened, even if only to be read, code that is executed under the name of
    such a file (from a zip file, or from a cache elsewhere), and libraries of machine code. Data (.yaml, .npz) that the
    workload opens there by an absolute path is no code: it is left alone, and so is the same in both measurements.

    Args:
        checkout: Of `Checkout.to_record`, of another checkout.
    """

    def __init__(self, checkout: Mapping[str, str]) -> None:
        self._original, self._root = checkout["original"], checkout["root"]
        self._first: str | None = None
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.startswith("/"):  # An import makes it absolute; torch.ops says `_ops.py`.
                self._look(file)
        sys.addaudithook(self._hear)

    def check(self) -> None:
        """Refuse what was heard of.

        Raises:
            NotMeasuredError: Code was loaded from the user's folders.
        """
        if self._first is not None:
            raise explain_stray(self._first, self._original, self._root)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _HEARD or self._first is not None:
            return
        try:
            path = _path_of(event, arguments)
            if path is not None:
                self._look(path)
        except Exception:  # What cannot be looked at cannot be loaded either; whoever loads it is told so.
            return

    def _look(self, path: str) -> None:
        if self._first is None and is_original(os.path.realpath(path), self._original, self._root):
            self._first = str(Path(path).absolute())


def explain_stray(path: str, original: str, root: str) -> NotMeasuredError:
    """What to say of a file that was loaded from the user's folders, by the way that led there.

    Args:
        path: The file, as it was asked for.
        original: The top of the user's repository.
        root: The top of what is checked out.
    """
    with suppress(ValueError, NotImplementedError):
        path = source_from_cache(path)
    place = os.path.realpath(path)
    missed = "not from the revision that is to be measured"
    link = _link_into(path, original)
    if link is not None:
        target = Path(os.path.realpath(link))
        if is_within(str(link), root):
            seen, hint = link.relative_to(root), f"link it by a relative path, {_AGAIN}"
        elif link.name == target.name:
            seen, hint = link, f"set PYTHONPATH={target.parent}"
        else:
            seen, hint = link, f"set PYTHONPATH to a folder of the repository that has it by the name {link.name}"
        return NotMeasuredError(f"{seen} is a symbolic link to {target}, {missed}", hint=hint)
    entry = next((entry for entry in sys.path if _holds(entry, place, original, root)), None)
    if entry is not None:
        return NotMeasuredError(
            f"{place} is loaded, {missed}, since the workload puts {entry} on sys.path",
            hint=f"have that path start from Path(__file__), {_AGAIN}",
        )
    return NotMeasuredError(
        f"{place} is loaded, {missed}, by an absolute path in the code or as an editable installation has it",
        hint=f"have the path start from Path(__file__), {_AGAIN}; or uninstall what is installed, and set"
        f" PYTHONPATH={_top(place)}",
    )


def _path_of(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The file that an event is about, if it is one of code.

    They are those of CPython (https://docs.python.org/3/library/audit_events.html); `import` has a file for a library
    of machine code alone.
    """
    path = arguments[1] if event == "import" else arguments[0]
    if event == "exec":
        path = path.co_filename
    if path is None or isinstance(path, int):
        return None
    path = os.fsdecode(path)
    return None if path.startswith("<") or event == "open" and not path.endswith(_CODE) else path


def _link_into(path: str, original: str) -> Path | None:
    """The symbolic link on the way to a path that leads into a folder from without, if there is one."""
    for step in (*reversed(Path(path).parents), Path(path)):
        real = os.path.realpath(step)
        if is_within(real, original):
            return step if step.is_symlink() and real != original else None
    return None


def _holds(entry: str, place: str, original: str, root: str) -> bool:
    """Whether a module at `place` is found through an entry of `sys.path`."""
    folder = os.path.realpath(entry)
    return bool(entry) and is_original(folder, original, root) and is_within(place, folder)


def _top(place: str) -> Path:
    """The folder that a module is imported from: above its packages."""
    folders = Path(place).parents
    return next(folder for folder in folders if not (folder / "__init__.py").exists())
