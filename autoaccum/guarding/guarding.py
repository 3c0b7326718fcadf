"""`guard`: every case that is asked for is measured and compared, or locked."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from autoaccum.devices.checkout import Checkout
from autoaccum.errors import AutoaccumError, LockFileError, MissingLockError, NotMeasuredError, UsageError
from autoaccum.guarding.asked.project import Project
from autoaccum.guarding.asked.selection import Selection, asked_words, select_cases
from autoaccum.guarding.asked.tolerance import Tolerance
from autoaccum.guarding.events import CheckedOut, Listener
from autoaccum.guarding.judgements import Judgement, Report
from autoaccum.guarding.locking import Locked
from autoaccum.guarding.locks.lock_file import sole_writer, write_lock
from autoaccum.guarding.records import Case
from autoaccum.guarding.revisions.baseline import check_there, checked_out
from autoaccum.guarding.rounds import Measure, Round
from autoaccum.guarding.verdict.comparing import compare
from autoaccum.guarding.verdict.judging import unmeasured
from autoaccum.planning.files import check_output


def guard(
    selection: Selection,
    project: Project,
    *,
    update: bool = False,
    prune: bool = False,
    baseline: str | None = None,
    tolerance: Tolerance | None = None,
    time_limit: float | None = None,
    force: bool = False,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Report:
    """Measure what is guarded, and compare it with the lock, or with another revision.

    What cannot be measured or compared is a judgement of its own, `unmeasured`, and ends none of the others. Ctrl-C
    ends everything, and no lock is written.

    Args:
        selection: Which cases.
        project: Where they lie, and what is named there.
        update: Plan anew, and write the lock in place of comparing with it: once, at the end. What could not be
            measured keeps the entry it had.
        prune: Drop entries that `pyproject.toml` does not name.
        baseline: Compare with this revision, measured here too; a lock names cases at most, and none is written.
        tolerance: By how much memory may grow; None: as the project has it, else 1 %.
        time_limit: Seconds that all searches may take; what is not known by then is `unmeasured`.
        force: Write a new lock over one that cannot be read.
        on_event: Told of every step, with a record of `guarding.events`.
        on_output: Given what workloads print, line by line; stderr otherwise.

    Raises:
        UsageError: What is asked for does not go together, or the lock cannot be written.
        LockFileError: The lock cannot be read; it stays as it is.
        MissingLockError, NotMeasuredError: There is nothing to guard, or the revision cannot be checked out.
    """
    _check_together(selection, project, update=update, prune=prune, baseline=baseline)
    allowed = tolerance or project.tolerance or Tolerance()
    deadline = None if time_limit is None else time.monotonic() + time_limit
    tell = on_event or (lambda event: None)
    if baseline is not None:
        round_ = Round(tell, on_output, deadline, partial(_unmeasured, None, selection))
        return _compare_revisions(selection, project, baseline, allowed, round_)
    locked = _read(project, fresh=update and force)
    if update:
        check_output(project.lock, force=True, way_out="name another by --lock")
    cases = _cases(selection, locked, prune=prune, force=force)
    locked.check_kept(cases, prune=prune)
    round_ = Round(tell, on_output, deadline, partial(_unmeasured, locked, selection))
    judgements = round_.judge_all(cases, partial(locked.relock if update else locked.check, tolerance=allowed))
    written = None
    if any(judgement.outcome == "locked" for judgement in judgements):
        with sole_writer(project.lock):
            now = _read(project, fresh=force)  # Another guard may have written it meanwhile.
            dropped = locked.unnamed if prune else ()
            write_lock(project.lock, now.relocked(judgements, dropped=dropped, prune=prune), force=force)
        written = _from_here(project.lock)
    return Report(judgements=judgements, against=_from_here(project.lock), tolerance=allowed, updated=written)


def _check_together(selection: Selection, project: Project, *, update: bool, prune: bool, baseline: str | None) -> None:
    if update and baseline is not None:
        raise UsageError("both an update and a baseline are asked for", hint="a baseline needs no lock: take one")
    if not prune:
        return
    if not update or selection != Selection():
        raise UsageError("--prune is about the whole lock", hint="run `autoaccum guard --update --prune`")
    if not project.cases:
        raise UsageError(
            "--prune would drop everything: pyproject.toml names nothing that is guarded",
            hint="name it in [[tool.autoaccum.guard]]",
        )


def _read(project: Project, *, fresh: bool) -> Locked:
    """The lock; where it cannot be read and a `fresh` one is wanted, what can be told of it."""
    try:
        return Locked.read(project)
    except LockFileError:
        if not fresh:
            raise
        return Locked.salvage(project)


def _cases(selection: Selection, locked: Locked, *, prune: bool, force: bool) -> tuple[Case, ...]:
    """The cases of a call, in the order of the lock.

    Raises:
        MissingLockError, NotMeasuredError: There are none.
    """
    project = locked.project
    known = project.cases if prune else locked.named
    cases = locked.without_moved(select_cases(selection, project, known, locked.gone))
    if cases:
        return cases
    flags = ("--update", "--force") if force else ("--update",)
    hint = f"lock it by `{asked_words(selection, *project.options, *flags)}`"
    if not locked.there and not project.cases:
        raise MissingLockError(f"there is no {project.lock.name} in {project.lock.parent}", hint=hint)
    about = "nothing" if selection.workload is None else f"nothing of {selection.workload}"
    raise NotMeasuredError(f"{about} that is locked or named in pyproject.toml is as asked", hint=hint)


def _unmeasured(locked: Locked | None, selection: Selection, case: Case, error: AutoaccumError) -> Judgement:
    """That a case cannot be measured, and what to do about an entry that was left behind."""
    told = unmeasured(case, error, called=selection.workload is not None)
    if locked is None or case not in locked.lock.entries or case in locked.project.cases:
        return told
    project, hint, command = locked.project, f"delete its entry from {locked.project.lock.name}", ""
    if project.cases:
        hint, command = "drop its entry", shlex.join(["autoaccum", "guard", *project.options, "--update", "--prune"])
    hints = (told.hint or "mend it", f"{hint} if it is guarded no more")
    return dataclasses.replace(told, hint=", or ".join(hints), command=command)


def _compare_revisions(
    selection: Selection, project: Project, revision: str, tolerance: Tolerance, round_: Round
) -> Report:
    """Measure all cases in both."""
    cases = select_cases(selection, project, () if selection.is_whole else Locked.read(project).named)
    if not cases:
        raise NotMeasuredError(
            "neither pyproject.toml nor a lock names anything that is as asked",
            hint="name it in [[tool.autoaccum.guard]], or give WORKLOAD --gpu NAME --target-batch N",
        )
    with checked_out(project.folder, revision) as checkout:
        round_.tell(CheckedOut(revision))

        def judge(case: Case, measure: Measure) -> Judgement:
            try:
                check_there(checkout, case.workload, project.folder, revision)
                before = measure(checkout).measurement
            except AutoaccumError as error:
                raise NotMeasuredError(f"at {revision}: {error.message}", hint=error.hint) from error
            now = measure(Checkout(project.folder), before.micro_batches)
            return compare(case, before, now, tolerance, command="")

        judgements = round_.judge_all(cases, judge)
    return Report(judgements=judgements, against=revision, tolerance=tolerance)


def _from_here(path: Path) -> str:
    """A path as it is shown: relative to the current folder, where it lies within."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown
