"""The guarded project: its settings in `pyproject.toml`, its lock, the cases a command selects, and other revisions."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.accumulation.step_result import DelayedInterrupts
from autoaccum.devices.child.import_paths import Checkout
from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError
from autoaccum.guarding.cases import CASE_FIELDS, Case, case_name, check_case, guard_command, make_case
from autoaccum.guarding.guard_result import parse_tolerance
from autoaccum.sources.module_names import split_reference
from autoaccum.units import MemorySize

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCK_NAME = "autoaccum.lock"
_PYPROJECT = "pyproject.toml"
_KEYS = ("tolerance", "lock", "guard")

_PREFIX = "autoaccum-baseline-"

_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
"""Variables that git sets within a hook, which would lead away from the worktree's files."""

_GIT_SETTINGS = ("core.hooksPath=/dev/null", "submodule.recurse=false", "gc.auto=0")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder in which workloads are guarded.

    Attributes:
        folder: The absolute folder; workloads are relative to it, and child processes run in it.
        lock: The absolute path of the lock file; it need not exist.
        tolerance: The tolerance of `[tool.autoaccum]`; None where there is none.
        cases: The cases of `[tool.autoaccum]`, in their order.
    """

    folder: Path
    lock: Path
    tolerance: MemorySize | None = None
    cases: tuple[Case, ...] = ()

    def reference(self, workload: str, cwd: Path) -> str:
        """Return a reference given in `cwd` as a case has it: relative to `folder`.

        Raises:
            UsageError: It is a file outside of `folder`, which a lock could not find in another checkout.
        """
        target, _, name = split_reference(workload)
        path = cwd / Path(target).expanduser()
        # A link to a file keeps its own name; links to its folder are resolved.
        resolved, folder = Path(os.path.realpath(path.parent)) / path.name, os.path.realpath(self.folder)
        if not resolved.is_relative_to(folder):
            raise UsageError(
                f"{workload} lies outside of {self.folder}, the folder of the lock",
                hint=f"guard it from its own folder: cd {resolved.parent}",
            )
        relative = resolved.relative_to(folder).as_posix()
        return f"{relative}:{name}" if name else relative


def find_project(cwd: Path) -> Project:
    """Find the project that contains `cwd`.

    Its folder is that of the nearest `pyproject.toml` with a `[tool.autoaccum]`; else that of the nearest lock from
    `cwd` upwards; else `cwd` itself.

    Raises:
        UsageError: `[tool.autoaccum]` is not valid, or its file cannot be read.
    """
    cwd = cwd.resolve()
    folders = (cwd, *cwd.parents)
    for folder in folders:
        table = _read_table(folder / _PYPROJECT)
        if table is not None:
            return _read_project(folder, table)
    folder = next((folder for folder in folders if (folder / LOCK_NAME).is_file()), cwd)
    return Project(folder=folder, lock=folder / LOCK_NAME)


def select_cases(wanted: Sequence[Case], project: Project, known: Iterable[Case]) -> tuple[Case, ...]:
    """Return the selected cases, ordered by name.

    `wanted` are cases with some fields given, one for each card; `known` are the named and the locked cases.

    Raises:
        UsageError: A value is not valid, or a size is given without a workload, or without a card.
        NotMeasuredError: No known case has the given values.
    """
    known, found = list(known), dict[Case, None]()
    for part in wanted:
        written = check_case(part, partial=True)
        if written.has_size and not written.workload:
            raise UsageError("a batch is given without a workload", hint="name it: autoaccum guard model.py ...")
        if written.workload:
            written = dataclasses.replace(written, workload=project.reference(written.workload, Path.cwd()))
        alike = [written] if written.is_complete else [case for case in known if written.matches(case)]
        if not alike and written.has_size and not written.is_complete:
            raise UsageError(
                f"no card is given to guard {written.workload} on",
                hint="add --gpu NAME (see `autoaccum gpus`)",
            )
        if not alike:
            of = f" of {part.workload}" if part.workload else ""
            on = f" on {part.options.gpu}" if part.options.gpu else ""
            raise NotMeasuredError(
                f"no case{of}{on} in the lock or in pyproject.toml has the given options",
                hint=f"lock it by `{guard_command(written, project.folder, '--update')}`",
            )
        found |= dict.fromkeys(alike)
    return tuple(sorted(found, key=case_name))


def _read_table(path: Path) -> Any:
    """Return `[tool.autoaccum]`; None where the file or the table does not exist."""
    if not path.is_file():
        return None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("autoaccum")
    except (OSError, ValueError) as error:  # TOML's errors are ValueErrors, too.
        raise UsageError(f"{path} cannot be read ({error})", hint="correct it") from None


def _read_project(folder: Path, table: Any) -> Project:
    _check_keys(table, _KEYS, f"[tool.autoaccum] in {folder / _PYPROJECT}")
    tolerance, lock = table.get("tolerance"), folder / str(table.get("lock", LOCK_NAME))
    project = Project(folder=folder, lock=lock, tolerance=None if tolerance is None else parse_tolerance(tolerance))
    return dataclasses.replace(project, cases=tuple(_read_cases(project, table.get("guard", []))))


def _read_cases(project: Project, entries: Any) -> Iterator[Case]:
    settings = project.folder / _PYPROJECT
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(
            f"guard in {settings} is not a list of tables", hint="write one [[tool.autoaccum.guard]] for each case"
        )
    for number, entry in enumerate(entries, 1):
        where = f"[[tool.autoaccum.guard]] {number} in {settings}"
        _check_keys(entry, [name.replace("_", "-") for name in CASE_FIELDS], where)
        try:
            yield from [check_case(case) for case in _expanded(project, entry)]
        except AutoaccumError as error:
            raise UsageError(f"{where}: {error.message}", hint=error.hint) from None


def _expanded(project: Project, entry: dict[str, Any]) -> Iterator[Case]:
    """Yield a case for each card that an entry lists."""
    given = {key.replace("-", "_"): value for key, value in entry.items()}
    if not isinstance(given.get("workload"), str):
        raise UsageError("it has no workload", hint='add one, such as workload = "train.py"')
    given["workload"] = project.reference(given["workload"], project.folder)
    gpus = given.pop("gpu", None)
    for gpu in gpus if isinstance(gpus, list) else [gpus]:
        yield make_case(**given, gpu=gpu)


def _check_keys(table: Iterable[str], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise UsageError(f"{where} has the unknown key {key!r}", hint=f"the keys are {', '.join(known)}")


@contextmanager
def checked_out(folder: Path, revision: str) -> Iterator[Checkout]:
    """Check out `revision` in a temporary worktree outside the repository, and yield the same `folder` in it.

    The worktree is removed afterwards; if this process is killed, `git worktree prune` removes it. The user's files,
    index, HEAD and hooks are not touched. Neither submodules nor large files (Git LFS) are fetched.

    Raises:
        UsageError: `revision` cannot be the name of a revision.
        NotMeasuredError: It cannot be checked out: there is no git, no repository, no such revision or folder in it.
    """
    if not revision.strip() or revision.startswith("-") or "\0" in revision:
        raise UsageError(f"{revision!r} is not a revision", hint="name a commit, a branch or a tag, such as HEAD~1")
    top = Path(_git(folder, "rev-parse", "--show-toplevel", hint="run it in a clone, or compare with a lock")).resolve()
    commit = _git(
        folder,
        *("rev-parse", "--verify", f"{revision}^{{commit}}"),
        hint="name a commit, a branch or a tag; a shallow clone needs `git fetch --unshallow`, or fetch-depth: 0 of"
        " actions/checkout",
    )
    worktree = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    try:
        _git(folder, "worktree", "add", "--detach", "--quiet", str(worktree), commit, hint="try `git worktree add`")
        inside = worktree / folder.resolve().relative_to(top)
        if not inside.is_dir():
            raise NotMeasuredError(
                f"{revision} has no folder {inside.relative_to(worktree)}", hint="name a revision that has the project"
            )
        yield Checkout(inside, original=top, root=worktree)
    finally:
        with DelayedInterrupts():
            _run(folder, "worktree", "remove", "--force", "--force", str(worktree))  # Twice: even if incomplete.
            shutil.rmtree(worktree, ignore_errors=True)


def _git(folder: Path, *words: str, hint: str) -> str:
    """Return the output of a git command in a folder; raise NotMeasuredError if it cannot be run, or fails."""
    done = _run(folder, *words)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("fatal: ")
        raise NotMeasuredError(f"git cannot find or check out the revision ({reason})", hint=hint)
    return done.stdout.strip()


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git in its own session, so that Ctrl-C reaches only this process."""
    kept = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    settings = [word for setting in _GIT_SETTINGS for word in ("-c", setting)]
    try:
        return subprocess.run(
            ["git", *settings, *words],
            cwd=folder,
            env={**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise NotMeasuredError(
            f"git cannot be run ({error.strerror})", hint="install it, or compare with a lock, without --baseline"
        ) from None
