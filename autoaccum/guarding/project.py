"""The guarded project: the folder of its lock, the cases that a command selects, and other revisions."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autoaccum.accumulation.step_result import DelayedInterrupts
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.guarding.cases import Case, case_name, check_case, check_complete, guard_command
from autoaccum.sources.source import NamedSource, find_source

LOCK_NAME = "autoaccum.lock"

_PREFIX = "autoaccum-baseline-"

_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
"""Variables that git sets within a hook, which would lead away from the worktree's files."""

_GIT_SETTINGS = ("core.hooksPath=/dev/null", "submodule.recurse=false", "gc.auto=0")


def find_folder(cwd: Path, listing: Path | None = None) -> Path:
    """Return the nearest folder from `cwd` upwards that has a lock, or is `listing`, else `cwd`.

    Workloads are relative to it. `listing` is the folder whose settings list cases.
    """
    cwd = cwd.resolve()
    return next((place for place in (cwd, *cwd.parents) if (place / LOCK_NAME).is_file() or place == listing), cwd)


def place_within(folder: Path, workload: str, cwd: Path) -> str:
    """Return a reference given in `cwd` as a case has it: relative to `folder`.

    Raises:
        UsageError: It is a file outside of `folder`, which a lock could not find in another checkout.
    """
    source = find_source(workload)
    if isinstance(source, NamedSource):
        return workload
    path = cwd / Path(source.file).expanduser()
    # A link to a file keeps its own name; links to its folder are resolved.
    resolved, root = Path(os.path.realpath(path.parent)) / path.name, os.path.realpath(folder)
    if not resolved.is_relative_to(root):
        raise UsageError(
            f"{workload} lies outside of {folder}, the folder of the lock",
            hint=f"guard it from its own folder: cd {resolved.parent}",
        )
    return source.at(resolved.relative_to(root).as_posix()).name


def select_cases(wanted: Sequence[Case], folder: Path, locked: Iterable[Case]) -> tuple[Case, ...]:
    """Return the selected cases, ordered by name.

    `wanted` are cases with some fields given, one for each card; one without any selects all that are `locked`.

    Raises:
        UsageError: A value is not valid, or a size is given without a workload, or without a card.
        NotMeasuredError: No locked case has the given values.
    """
    locked, selected = list(locked), dict[Case, None]()
    for given in wanted:
        part = check_case(given)
        if part.has_size and not part.workload:
            raise UsageError("a batch is given without a workload", hint="name it: autoaccum guard model.py ...")
        if part.workload and part.command() is None:
            part = dataclasses.replace(part, workload=place_within(folder, part.workload, Path.cwd()))
        alike = [part] if part.is_complete else [case for case in locked if part.matches(case)]
        if not alike and part.has_size:
            check_complete(part)
        if not alike:
            of = f" of {given.workload}" if given.workload else ""
            on = f" on {given.options.gpu}" if given.options.gpu else ""
            raise NotMeasuredError(
                f"no case{of}{on} in the lock has the given options",
                hint=f"lock it by `{guard_command(part, folder, '--update')}`",
            )
        selected |= dict.fromkeys(alike)
    return tuple(sorted(selected, key=case_name))


@contextmanager
def checked_out(folder: Path, revision: str) -> Iterator[ImportPaths]:
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
        yield ImportPaths.of(inside, original=top, root=worktree)
    finally:
        with DelayedInterrupts():
            _run(folder, "worktree", "remove", "--force", "--force", str(worktree))  # Twice: even if incomplete.
            shutil.rmtree(worktree, ignore_errors=True)


def _git(folder: Path, *words: str, hint: str) -> str:
    """Return the output of a git command in a folder; raise NotMeasuredError if it cannot be run, or fails."""
    git = _run(folder, *words)
    if git.returncode:
        reason = (git.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("fatal: ")
        raise NotMeasuredError(f"git cannot find or check out the revision ({reason})", hint=hint)
    return git.stdout.strip()


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git in its own session, so that Ctrl-C reaches only this process."""
    variables = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    settings = [word for setting in _GIT_SETTINGS for word in ("-c", setting)]
    try:
        return subprocess.run(
            ["git", *settings, *words],
            cwd=folder,
            env={**variables, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"},
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
