"""Where a workload is defined, for annotations: its file from the repository's root, and the line."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoaccum.workload.references import split_reference

_USUAL_NAMES = ("workload", "model")


@dataclass(frozen=True)
class SourcePlace:
    """A file, from the repository's root, with `/`; and a line of it, from 1."""

    file: str
    line: int


def find_place(workload: str, folder: Path, environment: Mapping[str, str]) -> SourcePlace | None:
    """Where `workload` is defined; nothing is imported.

    Args:
        workload: `model.py`, `model.py:name`, relative to `folder`, or `package.module:name`.
        folder: The project's.
        environment: Where GitHub's runner tells of the repository.

    Returns:
        None where there is no such file in the repository.
    """
    path = source_file(workload, folder)
    if path is None:
        return None
    root = _root(folder, environment)
    try:
        file = path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return None
    return SourcePlace(file, _line(path, split_reference(workload)[2]))


def source_file(workload: str, folder: Path) -> Path | None:
    """The file that defines `workload`; a module is looked for in `folder` and its `src`. None where there is none."""
    candidates = _candidates(split_reference(workload)[0], folder)
    return next((path for path in candidates if path.is_file()), None)


def _candidates(target: str, folder: Path) -> Iterator[Path]:
    yield folder / target
    parts = target.split(".")
    for base in (folder, folder / "src"):
        yield base.joinpath(*parts).with_suffix(".py")
        yield base.joinpath(*parts, "__init__.py")


def _root(folder: Path, environment: Mapping[str, str]) -> Path:
    """The checkout: the runner's folder, or the nearest one upwards that git keeps, or the project itself."""
    workspace = environment.get("GITHUB_WORKSPACE")
    if workspace and folder.resolve().is_relative_to(Path(workspace).resolve()):
        return Path(workspace)
    return next((one for one in (folder.resolve(), *folder.resolve().parents) if (one / ".git").exists()), folder)


def _line(path: Path, name: str) -> int:
    """The line that defines what is asked for, or the first of the usual names; 1 where none does."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return 1
    lines = dict(_definitions(tree.body))
    return next((lines[one] for one in ([name] if name else _USUAL_NAMES) if one in lines), 1)


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Names and lines of what a module defines or imports, also under an `if` or `try`."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name, statement.lineno
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from (((alias.asname or alias.name), statement.lineno) for alias in statement.names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                yield from ((one.id, statement.lineno) for one in ast.walk(target) if isinstance(one, ast.Name))
        else:
            for inner in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(statement, inner, []))
