"""The folder that a guard is about: what `pyproject.toml` says of it, where its lock lies, and what a call selects."""

from __future__ import annotations

import dataclasses
import difflib
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError
from autoaccum.guarding.cases import CASE_FIELDS, Case, case_name, check_case, guard_command, make_case
from autoaccum.guarding.guard_result import Tolerance, parse_tolerance
from autoaccum.workload.module_names import split_reference

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCK_NAME = "autoaccum.lock"
_SETTINGS = "pyproject.toml"
_KEYS = ("tolerance", "lock", "guard")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder in which workloads are guarded.

    Attributes:
        folder: Absolute; workloads are relative to it, and children run in it.
        lock: The lock file, absolute; it need not be there.
        tolerance: Of `[tool.autoaccum]`; None where that says none.
        cases: The cases that `[tool.autoaccum]` names, in its order.
        options: Words of a command that is about this lock, such as `--lock FILE`.
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
        target, _, name = split_reference(workload)
        path = cwd / Path(target).expanduser()
        if not (target.endswith(".py") or "/" in target or path.is_file()):
            return workload
        # A link to a file is known by its own name, whatever leads to its folder.
        place, folder = Path(os.path.realpath(path.parent)) / path.name, os.path.realpath(self.folder)
        if not place.is_relative_to(folder):
            raise UsageError(
                f"{workload} lies outside of {self.folder}, the folder of the lock",
                hint=f"guard it from its own folder: cd {place.parent}",
            )
        relative = place.relative_to(folder).as_posix()
        return f"{relative}:{name}" if name else relative

    def command(self, case: Case, *flags: str) -> str:
        """The command about a case, or a part of one, and this lock."""
        return guard_command(case, self.folder, *self.options, *flags)

    @property
    def anew(self) -> str:
        """The command that writes the whole lock anew."""
        flags = (*self.options, "--update", "--force")
        return shlex.join(["autoaccum", "guard", *flags]) if self.cases else guard_command(Case(), self.folder, *flags)


def find_project(cwd: Path, lock: str | None = None) -> Project:
    """The project that `cwd` lies in.

    Its folder is that of the nearest `pyproject.toml` with a `[tool.autoaccum]`, else that of the lock, which is the
    nearest from `cwd` upwards where none is named, else `cwd` itself.

    `lock` is another lock than the project's, relative to `cwd`.

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


def select_cases(wanted: Sequence[Case], project: Project, known: Iterable[Case]) -> tuple[Case, ...]:
    """The cases that are asked for, ordered by name.

    `wanted` are parts of cases, one for each card; `known` are those that are named or locked.

    Raises:
        UsageError: Something cannot be asked for so, or a size is without a workload, or without a card or device.
        NotMeasuredError: Nothing that is known is as asked.
    """
    known, found = list(known), dict[Case, None]()
    for part in wanted:
        written = check_case(part, partial=True)
        if written.has_size and not written.workload:
            raise UsageError("a batch is given without a workload", hint="name it: autoaccum guard model.py ...")
        if written.workload:
            written = dataclasses.replace(written, workload=project.reference(written.workload, Path.cwd()))
        alike = [written] if written.is_whole else [case for case in known if written.matches(case)]
        if not alike and written.has_size and not written.is_whole:
            raise UsageError(
                f"{written.workload} is to be guarded, and no card is named",
                hint="add --gpu NAME (see `autoaccum gpus`), or --device cpu to measure here",
            )
        if not alike:
            asked = f" on {part.place}" if part.place else ""
            about = f"nothing of {part.workload}{asked}" if part.workload else f"nothing{asked}"
            raise NotMeasuredError(
                f"{about} that is locked or named in pyproject.toml is as asked",
                hint=f"lock it by `{project.command(written, '--update')}`",
            )
        found |= dict.fromkeys(alike)
    return tuple(sorted(found, key=case_name))


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
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
        settings = tomllib.loads(content.decode())
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})", hint="correct that") from None
    except ValueError as error:  # TOML's errors are ValueErrors, too.
        if b"autoaccum" not in content:
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
    project = Project(
        folder=folder,
        lock=folder / named,
        tolerance=None if tolerance is None else parse_tolerance(tolerance),
    )
    return dataclasses.replace(project, cases=tuple(_read_cases(project, table.get("guard", []))))


def _read_cases(project: Project, entries: Any) -> Iterator[Case]:
    settings = project.folder / _SETTINGS
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"guard in {settings} is no list of tables", hint="write [[tool.autoaccum.guard]] for each")
    seen: set[Case] = set()
    for number, entry in enumerate(entries, 1):
        where = f"[[tool.autoaccum.guard]] {number} in {settings}"
        _check_keys(entry, [name.replace("_", "-") for name in CASE_FIELDS], where)
        try:
            cases = [check_case(case) for case in _expanded(project, entry)]
        except AutoaccumError as error:
            raise UsageError(f"{where}: {error.message}", hint=error.hint) from None
        for case in cases:
            if case in seen:
                raise UsageError(f"{where} names {case_name(case)} once more", hint="name it once")
            seen.add(case)
            yield case


def _expanded(project: Project, entry: dict[str, Any]) -> Iterator[Case]:
    """A case for each card and precision that an entry lists."""
    given = {key.replace("-", "_"): value for key, value in entry.items()}
    if not isinstance(given.get("workload"), str):
        raise UsageError("it names no workload", hint='add such as workload = "train.py"')
    given["workload"] = project.reference(given["workload"], project.folder)
    for gpu in _listed(given.pop("gpu", None), "gpu"):
        for precision in _listed(given.get("precision"), "precision"):
            yield make_case(**{**given, "gpu": gpu, "precision": precision})


def _listed(given: Any, what: str) -> list[Any]:
    if given == []:
        raise UsageError(f"{what} is an empty list", hint="name one, or leave it out")
    return given if isinstance(given, list) else [given]


def _check_keys(table: Iterable[str], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{where} has the unknown key {key!r}", hint=hint)
