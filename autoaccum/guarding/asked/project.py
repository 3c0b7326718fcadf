"""The folder that a guard is about: what `pyproject.toml` says of it, and where its lock lies."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.errors import AutoaccumError, UsageError
from autoaccum.guarding.asked.cases import case_name, expand_cases
from autoaccum.guarding.asked.tolerance import Tolerance, parse_tolerance
from autoaccum.guarding.records import Case
from autoaccum.workload.references import split_reference

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCK_NAME = "autoaccum.lock"
_SETTINGS = "pyproject.toml"
_KEYS = ("tolerance", "lock", "guard")
_CASE_KEYS = tuple(field.name.replace("_", "-") for field in dataclasses.fields(Case))


@dataclass(frozen=True, kw_only=True)
class Project:
    """What is guarded in a folder.

    Attributes:
        folder: Absolute; workloads are relative to it, and children run in it.
        lock: The lock file, absolute; it need not be there.
        tolerance: Of `[tool.autoaccum]`; None where that says none.
        cases: What `[tool.autoaccum]` names, in its order.
        options: What a command has to say to be about this lock, such as `--lock FILE`.
    """

    folder: Path
    lock: Path
    tolerance: Tolerance | None = None
    cases: tuple[Case, ...] = ()
    options: tuple[str, ...] = ()

    def reference(self, workload: str, cwd: Path) -> str:
        """A reference that was written in `cwd`, as a case has it: a file relative to `folder`, a module as it is.

        Raises:
            UsageError: It is a file outside of `folder`, where the lock would not know it in another checkout.
        """
        return _reference(workload, cwd, self.folder)


def find_project(cwd: Path, lock: str | None = None) -> Project:
    """The project that `cwd` lies in.

    Its folder is that of the nearest `pyproject.toml` with a `[tool.autoaccum]`, else that of the lock, which is the
    nearest from `cwd` upwards where none is named, else `cwd` itself.

    Args:
        cwd: The current folder.
        lock: Another lock than the project's, relative to `cwd`.

    Raises:
        UsageError: `[tool.autoaccum]` says what cannot be honoured, or its file cannot be read.
    """
    if lock is not None and not lock.strip():
        raise UsageError(f"the lock is {lock!r}", hint=f"name a file, such as {LOCK_NAME}")
    cwd = cwd.resolve()
    other = None if lock is None else cwd / Path(lock).expanduser()
    project = _find(cwd, other)
    if lock is None or other is None:
        return project
    return dataclasses.replace(project, lock=other, options=("--lock", lock))


def _find(cwd: Path, other: Path | None) -> Project:
    for folder in (cwd, *cwd.parents):
        table = _read_table(folder / _SETTINGS)
        if table is not None:
            return _read_project(folder, table)
    folder = next((folder for folder in (cwd, *cwd.parents) if (folder / LOCK_NAME).is_file()), cwd)
    folder = folder if other is None else other.parent.resolve()
    return Project(folder=folder, lock=folder / LOCK_NAME)


def _read_table(path: Path) -> Any:
    """`[tool.autoaccum]`; None where there is no such file, or none in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{path} cannot be read ({reason})", hint="correct that, or guard another folder") from None
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if "autoaccum" not in text:
            return None
        raise UsageError(f"{path} is not valid TOML ({error})", hint="correct it") from None
    tools = settings.get("tool", {})
    return tools.get("autoaccum") if isinstance(tools, dict) else None


def _read_project(folder: Path, table: Any) -> Project:
    if not isinstance(table, dict):
        raise UsageError(f"tool.autoaccum in {folder / _SETTINGS} is {table!r}", hint="write [tool.autoaccum]")
    _check_keys(table, _KEYS, f"[tool.autoaccum] in {folder / _SETTINGS}")
    tolerance, named = table.get("tolerance"), table.get("lock", LOCK_NAME)
    if not isinstance(named, str) or not named.strip():
        raise UsageError(f"lock in {folder / _SETTINGS} is {named!r}", hint=f'name a file, such as "{LOCK_NAME}"')
    return Project(
        folder=folder,
        lock=folder / named,
        tolerance=None if tolerance is None else parse_tolerance(tolerance),
        cases=tuple(_read_cases(folder, table.get("guard", []))),
    )


def _read_cases(folder: Path, entries: Any) -> list[Case]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(
            f"guard in {folder / _SETTINGS} is no list of tables", hint="write [[tool.autoaccum.guard]] for each"
        )
    cases: dict[Case, int] = {}
    for number, entry in enumerate(entries, 1):
        where = f"[[tool.autoaccum.guard]] {number} in {folder / _SETTINGS}"
        for case in _read_entry(entry, folder, where):
            if case in cases:
                raise UsageError(f"{where} names {case_name(case)}, as {cases[case]} does", hint="name it once")
            cases[case] = number
    return list(cases)


def _read_entry(entry: Mapping[str, Any], folder: Path, where: str) -> tuple[Case, ...]:
    _check_keys(entry, _CASE_KEYS, where)
    given = {key.replace("-", "_"): value for key, value in entry.items()}
    if not isinstance(given.get("workload"), str):
        raise UsageError(f"{where} names no workload", hint='add such as workload = "train.py"')
    if "target_batch" not in given and "micro_batch" not in given:
        raise UsageError(f"{where} has no target-batch", hint="add such as target-batch = 256")
    try:
        given["workload"] = _reference(given["workload"], folder, folder)
        return expand_cases(**given)
    except AutoaccumError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from None


def _check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{where} has the unknown key {key!r}", hint=hint)


def _reference(workload: str, cwd: Path, folder: Path) -> str:
    target, _, name = split_reference(workload)
    path = cwd / Path(target).expanduser()
    if not (target.endswith(".py") or "/" in target or path.is_file()):
        return workload
    # A link to a file is known by its own name, whatever leads to its folder.
    place = Path(os.path.realpath(path.parent)) / path.name
    if not place.is_relative_to(os.path.realpath(folder)):
        raise UsageError(
            f"{workload} lies outside of {folder}, the folder of the lock",
            hint=f"guard it from its own folder: cd {place.parent}",
        )
    relative = place.relative_to(os.path.realpath(folder)).as_posix()
    return f"{relative}:{name}" if name else relative
