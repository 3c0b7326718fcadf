"""A digest over a workload's file and the local modules it imports."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


def digest_sources(path: Path) -> str:
    """SHA-256 over the file at `path` and, transitively, the modules it imports from beside it or from its package.

    Read from the import statements, wherever they stand, so it does not depend on what a process has imported before;
    a module imported by other means does not count. Independent of where the directory lies.
    """
    top = path.parent
    while (top / "__init__.py").is_file() and top != top.parent:
        top = top.parent
    found: set[Path] = set()
    _collect(path, top, found)
    digest = hashlib.sha256()
    for file in sorted(found, key=lambda file: file.relative_to(top).as_posix()):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(os.fsencode(f"{file.relative_to(top).as_posix()}\0{content}\n"))
    return digest.hexdigest()


def _collect(file: Path, top: Path, found: set[Path]) -> None:
    packages = [place for place in file.parents if top in place.parents]
    waiting = [file, *(init for place in packages if (init := place / "__init__.py").is_file())]
    while waiting:
        current = waiting.pop()
        if current not in found and top in current.parents:
            found.add(current)
            waiting.extend(_imported(current, top))


def _imported(file: Path, top: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                for place in (top, file.parent):
                    yield from _files(place, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            places = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else [top, file.parent]
            for place in places:
                yield from _files(place, base)
                for alias in node.names:
                    yield from _files(place, [*base, alias.name])


def _files(place: Path, parts: list[str]) -> Iterator[Path]:
    """The files that importing `parts` from `place` runs: the `__init__.py` on the way, and the module."""
    for count in range(len(parts) + 1):
        step = place.joinpath(*parts[:count])
        for candidate in (step / "__init__.py", step.with_suffix(".py")):
            if count > 0 and candidate.is_file() and "-packages" not in str(candidate.relative_to(place)):
                yield candidate
