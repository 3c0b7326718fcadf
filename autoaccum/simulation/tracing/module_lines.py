"""The lines of the user's code that a model's modules come from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import nn

from autoaccum.sharded_tensors import model_class
from autoaccum.tracebacks import name_line


class _ClassSource(NamedTuple):
    """The lines of a class of the user's, from line `first` of a file."""

    file: str
    first: int
    lines: list[str]

    def find(self, attribute: str) -> str:
        """Return the first line that names an attribute of `self`, or else that of the class, as `file:line`."""
        named = re.compile(rf"\bself\.{re.escape(attribute)}\b")
        lines = (number for number, line in enumerate(self.lines, self.first) if attribute and named.search(line))
        return f"{self.file}:{next(lines, self.first)}"


def find_module_lines(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return, by path, the line that defines a module's class: `/home/me/model.py:12`.

    A module of a library has the line that names it first in the nearest of the user's classes around it. There may be
    none, as in an `nn.Sequential` that a function makes.
    """
    kinds = {path: model_class(module) for path, module in modules}
    sources = {kind: _read_class(kind) for kind in kinds.values()}
    found = {}
    for path in kinds:
        around, attribute = path, ""
        while (source := sources.get(kinds.get(around, object))) is None and around:
            around, _, attribute = around.rpartition(".")
        if source is not None:
            found[path] = source.find(attribute)
    return found


def _read_class(kind: type) -> _ClassSource | None:
    """Return the source of a class; None for one of a library, or without a file, as in a notebook."""
    with suppress(TypeError, OSError):
        file = inspect.getsourcefile(kind)
        if file is not None and name_line(file, 0)[1]:
            lines, first = inspect.getsourcelines(kind)
            return _ClassSource(str(Path(file).resolve()), first, lines)
    return None
