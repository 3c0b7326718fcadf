"""`guard`: cases are measured and compared, with a lock or another revision, or locked; `check_fits` for tests."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autoaccum.checks import read_seconds
from autoaccum.devices.child.import_paths import Checkout
from autoaccum.errors import (
    AutoaccumError,
    DoesNotFitError,
    LockFileError,
    MissingLockError,
    NotMeasuredError,
    UsageError,
    WorkloadError,
)
from autoaccum.files import check_output
from autoaccum.guarding.baseline import checked_out
from autoaccum.guarding.cases import Case
from autoaccum.guarding.guard_result import (
    CaseFinished,
    CaseStarted,
    CheckedOut,
    Listener,
    Measurement,
    Report,
    Tolerance,
    Verdict,
)
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.measuring import measure
from autoaccum.guarding.project import Project, select_cases
from autoaccum.guarding.verdict import compare


def guard(
    wanted: Sequence[Case],
    project: Project,
    *,
    update: bool = False,
    baseline: str | None = None,
    tolerance: Tolerance | None = None,
    time_limit: float | None = None,
    force: bool = False,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Report:
    """Measure what is guarded, and compare it with the lock, or with another revision.

    What cannot be measured or compared is a verdict of its own, `unmeasured`, and ends none of the others. Ctrl-C
    ends everything, and no lock is written.

    Args:
        wanted: Parts of cases, one for each card; an empty one is for all that are known.
        project: Where they lie, and what is named there.
        update: Plan anew, and write the lock in place of comparing with it: once, at the end. What could not be
            measured keeps the entry it had.
        baseline: Compare with this revision, measured here too; a lock names cases at most, and none is written.
        tolerance: By how much memory may grow; None: as the project has it, else 1 %.
        time_limit: Seconds that all searches may take; what is not known by then is `unmeasured`.
        force: Write a new lock over one that cannot be read: what is not measured is in it no more.
        on_event: Told of every step, with a record of `guarding.records`.
        on_output: Given what workloads print, line by line; stderr otherwise.

    Raises:
        UsageError: What is asked for does not go together, or the lock cannot be written.
        LockFileError: The lock cannot be read; it stays as it is.
        MissingLockError, NotMeasuredError: There is nothing to guard, or the revision cannot be checked out.
    """
    if update and baseline is not None:
        raise UsageError("both an update and a baseline are asked for", hint="a baseline needs no lock: take one")
    if time_limit is not None:
        read_seconds(time_limit, "the time limit")
    allowed = tolerance or project.tolerance or Tolerance()
    is_whole = all(part.is_whole for part in wanted)
    locked = {} if baseline is not None and is_whole else _entries(project, fresh=update and force)
    known = (*project.cases, *locked)
    if not known and not is_whole:
        raise _nothing_known(wanted, project, baseline)
    if update:
        check_output(project.lock, force=True, hint="name another by --lock")
    cases = select_cases(wanted, project, known)
    round_ = _Round(
        project=project,
        locked=locked,
        tolerance=allowed,
        is_named=any(part.workload for part in wanted),
        tell=on_event or (lambda event: None),
        on_output=on_output,
        deadline=None if time_limit is None else time.monotonic() + time_limit,
    )
    if baseline is not None:
        with checked_out(project.folder, baseline) as there:
            round_.tell(CheckedOut(baseline))
            verdicts = round_.run_all(cases, partial(round_.compare_revisions, there, baseline))
        return Report(verdicts=verdicts, against=baseline, tolerance=allowed)
    verdicts = round_.run_all(cases, round_.relock if update else round_.compare_with_lock)
    found = {one.case: one.now for one in verdicts if one.outcome == "locked" and one.now is not None}
    if found:
        before = _entries(project, fresh=force)  # Another guard may have written it meanwhile.
        write_lock(project.lock, {**before, **found})
    lock = _from_here(project.lock)
    return Report(verdicts=verdicts, against=lock, tolerance=allowed, updated=lock if found else None)


def _entries(project: Project, *, fresh: bool) -> dict[Case, Measurement]:
    """What is locked; nothing where the lock cannot be read and a `fresh` one is wanted."""
    try:
        return read_lock(project.lock, project.anew)
    except LockFileError:
        if not fresh:
            raise
        return {}


def _nothing_known(wanted: Sequence[Case], project: Project, baseline: str | None) -> AutoaccumError:
    if baseline is not None:
        return NotMeasuredError(
            "neither pyproject.toml nor a lock names anything",
            hint="name it in [[tool.autoaccum.guard]], or give WORKLOAD --gpu NAME --target-batch N",
        )
    hint = f"lock it by `{project.command(wanted[0], '--update')}`"
    readable = " that can be read" if project.lock.exists() else ""
    return MissingLockError(f"there is no {project.lock.name}{readable} in {project.lock.parent}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class _Round:
    """One round over several cases: what goes wrong with one ends none of the others."""

    project: Project
    locked: Mapping[Case, Measurement]
    tolerance: Tolerance
    is_named: bool
    tell: Listener
    on_output: Callable[[str], None] | None
    deadline: float | None
    """By `time.monotonic`."""

    def run_all(self, cases: Sequence[Case], judge: Callable[[Case], Verdict]) -> tuple[Verdict, ...]:
        """The verdicts of all cases, in their order."""
        found = []
        for number, case in enumerate(cases, 1):
            self.tell(CaseStarted(case))
            try:
                verdict = judge(case)
            except AutoaccumError as error:
                verdict = self._unmeasured(case, error)
            self.tell(CaseFinished(number, len(cases), verdict))
            found.append(verdict)
        return tuple(found)

    def compare_with_lock(self, case: Case) -> Verdict:
        """Measure the locked schedule again, as it stands, and compare."""
        lock, command = self.project.lock, self.project.command(case, "--update")
        if case in self.locked:
            now = self._measure(case, micro_batches=self.locked[case].micro_batches)
            return compare(case, self.locked[case], now, self.tolerance, command=command)
        return Verdict(
            case=case,
            outcome="unmeasured",
            exit_code=NotMeasuredError.exit_code,
            reasons=(f"{lock.name} has no entry for it" if lock.exists() else f"there is no {lock.name}",),
            hint="lock what it takes now, on a branch that is right",
            command=command,
        )

    def relock(self, case: Case) -> Verdict:
        """Plan and measure anew, for an entry; what grew since the old one is told, and is no fault."""
        now, before = self._measure(case), self.locked.get(case)
        verdict = Verdict(case=case, outcome="locked", before=before, now=now, warnings=now.warnings)
        if before is None:
            return verdict
        seen = compare(case, before, now, self.tolerance)
        return dataclasses.replace(verdict, explanation=seen.explanation, growths=seen.growths)

    def compare_revisions(self, there: Checkout, revision: str, case: Case) -> Verdict:
        """Measure in both, and compare as with a lock."""
        try:
            before = self._measure(case, there)
        except AutoaccumError as error:
            raise NotMeasuredError(f"at {revision}: {error.message}", hint=error.hint) from error
        return compare(case, before, self._measure(case, micro_batches=before.micro_batches), self.tolerance)

    def _measure(
        self, case: Case, checkout: Checkout | None = None, micro_batches: tuple[int, ...] | None = None
    ) -> Measurement:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise NotMeasuredError("the limit on time was over before it was measured", hint="allow more")
        there = checkout or Checkout(self.project.folder)
        return measure(case, there, micro_batches=micro_batches, time_limit=left, on_output=self.on_output)

    def _unmeasured(self, case: Case, error: AutoaccumError) -> Verdict:
        """The error that came in place of figures, and what to do about an entry that was left behind.

        What is wrong with a workload that a lock or `pyproject.toml` names is no fault of the call: it could not be
        measured.
        """
        is_usage, hint = error.exit_code == UsageError.exit_code, error.hint or ""
        if case in self.locked and case not in self.project.cases:
            hint = f"{hint or 'mend it'}, or delete its entry from {self.project.lock.name} if it is guarded no more"
        return Verdict(
            case=case,
            outcome="too_large" if isinstance(error, DoesNotFitError) else "unmeasured",
            exit_code=NotMeasuredError.exit_code if is_usage and not self.is_named else error.exit_code,
            reasons=(error.message,),
            hint=hint,
            traceback=error.user_traceback if isinstance(error, WorkloadError) else None,
        )


def _from_here(path: Path) -> str:
    """A path as it is shown: relative to the current folder, where it lies within."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown
