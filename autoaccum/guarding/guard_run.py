"""Guard cases: measure them, compare them with the lock or another revision, or lock them anew."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from autoaccum.checks import check_alone, read_seconds
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
from autoaccum.guarding.verdict import compare, find_lost


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
    """Measure the guarded cases, and compare them with the lock or with another revision.

    A case that cannot be measured or compared gets the verdict `unmeasured`; the others go on. Ctrl-C ends everything,
    and no lock is written.

    Args:
        wanted: Cases to select, one for each card; fields may be missing, and an empty case selects all known ones.
        project: The project, with the cases that it names.
        update: Plan again, and write the lock at the end instead of comparing with it. A case that could not be
            measured keeps its entry.
        baseline: Compare with this revision, measured here too. A lock then only names cases, and none is written.
        tolerance: How much memory may grow; None: the project's tolerance, else 1 %.
        time_limit: Seconds for all searches together; cases that take longer are `unmeasured`.
        force: Replace a lock that cannot be read; it loses the cases that are not measured now.
        on_event: Called with each event of `autoaccum.guarding.guard_result`.
        on_output: Called with each line that workloads print; None: they go to stderr.

    Raises:
        UsageError: The arguments contradict each other, or the lock cannot be written.
        LockFileError: The lock cannot be read; it is not changed.
        MissingLockError, NotMeasuredError: There is nothing to guard, or the revision cannot be checked out.
    """
    check_alone("guard")
    if update and baseline is not None:
        raise UsageError(
            "an update and a baseline exclude each other", hint="give one of them: a baseline needs no lock"
        )
    if time_limit is not None:
        read_seconds(time_limit, "the time limit")
    allowed = tolerance or project.tolerance or Tolerance()
    is_whole = all(part.is_complete for part in wanted)
    locked = {} if baseline is not None and is_whole else _entries(project, fresh=update and force)
    known = (*project.cases, *locked)
    if not known and not is_whole:
        raise _nothing_to_guard(wanted, project, baseline)
    if update:
        check_output(project.lock, force=True, hint="name another by --lock")
    cases = select_cases(wanted, project, known)
    runner = _CaseRunner(
        project=project,
        locked=locked,
        tolerance=allowed,
        is_named=any(part.workload for part in wanted),
        notify=on_event or (lambda event: None),
        on_output=on_output,
        deadline=None if time_limit is None else time.monotonic() + time_limit,
    )
    if baseline is not None:
        with checked_out(project.folder, baseline) as there:
            runner.notify(CheckedOut(baseline))
            verdicts = runner.run_all(cases, partial(runner.compare_revisions, there, baseline))
        return Report(verdicts=verdicts, against=baseline, tolerance=allowed)
    verdicts = runner.run_all(cases, runner.lock_case if update else runner.compare_with_lock)
    found = {one.case: one.now for one in verdicts if one.outcome == "locked" and one.now is not None}
    if found:
        before = _entries(project, fresh=force)  # Another process may have written it meanwhile.
        write_lock(project.lock, {**before, **found})
    relative = os.path.relpath(project.lock)
    lock = str(project.lock) if relative.startswith("..") else relative
    return Report(verdicts=verdicts, against=lock, tolerance=allowed, updated=lock if found else None)


def _entries(project: Project, *, fresh: bool) -> dict[Case, Measurement]:
    """Return the entries of the lock; none where it cannot be read and a `fresh` one is to be written."""
    try:
        return read_lock(project.lock, project.rewrite_command)
    except LockFileError:
        if not fresh:
            raise
        return {}


def _nothing_to_guard(wanted: Sequence[Case], project: Project, baseline: str | None) -> AutoaccumError:
    if baseline is not None:
        return NotMeasuredError(
            "neither pyproject.toml nor a lock names a case",
            hint="name one in [[tool.autoaccum.guard]], or give WORKLOAD --gpu NAME --target-batch N",
        )
    hint = f"lock it by `{project.command(wanted[0], '--update')}`"
    readable = " that can be read" if project.lock.exists() else ""
    return MissingLockError(f"there is no {project.lock.name}{readable} in {project.lock.parent}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class _CaseRunner:
    """Runs several cases one after another; an error in one does not end the others."""

    project: Project
    locked: Mapping[Case, Measurement]
    tolerance: Tolerance
    is_named: bool
    notify: Listener
    on_output: Callable[[str], None] | None
    deadline: float | None
    """In seconds of `time.monotonic`."""

    def run_all(self, cases: Sequence[Case], evaluate: Callable[[Case], Verdict]) -> tuple[Verdict, ...]:
        found = []
        for number, case in enumerate(cases, 1):
            self.notify(CaseStarted(case))
            try:
                verdict = evaluate(case)
            except AutoaccumError as error:
                verdict = self._unmeasured(case, error)
            self.notify(CaseFinished(number, len(cases), verdict))
            found.append(verdict)
        return tuple(found)

    def compare_with_lock(self, case: Case) -> Verdict:
        """Measure the locked schedule again, and compare."""
        lock, command = self.project.lock, self.project.command(case, "--update")
        if case in self.locked:
            return self._compare(case, self.locked[case], command=command)
        for other, before in self.locked.items():
            if before.savers and _without_savers(other) == _without_savers(case):
                verdict = self._compare(case, before, command=command)
                if verdict.lost is not None:
                    return verdict
        return Verdict(
            case=case,
            outcome="unmeasured",
            exit_code=NotMeasuredError.exit_code,
            reasons=(f"{lock.name} has no entry for it" if lock.exists() else f"there is no {lock.name}",),
            hint="lock it on a branch that is known to be good",
            command=command,
        )

    def lock_case(self, case: Case) -> Verdict:
        """Plan and measure again for a new entry; growth since the old one is reported, and is no failure."""
        now, before = self._measure(case), self.locked.get(case)
        verdict = Verdict(case=case, outcome="locked", before=before, now=now, warnings=now.warnings)
        if before is None:
            return verdict
        seen = compare(case, before, now, self.tolerance)
        return dataclasses.replace(verdict, explanation=seen.explanation, growths=seen.growths)

    def compare_revisions(self, there: Checkout, revision: str, case: Case) -> Verdict:
        """Measure both revisions, and compare as with a lock."""
        try:
            before = self._measure(case, there)
        except AutoaccumError as error:
            raise NotMeasuredError(f"at {revision}: {error.message}", hint=error.hint) from error
        return self._compare(case, before)

    def _compare(self, case: Case, before: Measurement, command: str = "") -> Verdict:
        """Measure the schedule of `before`, and compare; where savers are lost, find what they saved."""
        now = self._measure(case, micro_batches=before.micro_batches)
        lost = find_lost(before, now)
        if lost is not None and lost.savers:
            options = dataclasses.replace(case.options, savers=before.savers)
            with suppress(AutoaccumError):  # The model may have no such blocks any more.
                saving = self._measure(dataclasses.replace(case, options=options), micro_batches=before.micro_batches)
                lost = dataclasses.replace(lost, saved_bytes=now.peak_bytes - saving.peak_bytes)
        return compare(case, before, now, self.tolerance, command=command, lost=lost)

    def _measure(
        self, case: Case, checkout: Checkout | None = None, micro_batches: tuple[int, ...] | None = None
    ) -> Measurement:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise NotMeasuredError("the time limit was reached before it was measured", hint="allow more time")
        there = checkout or Checkout(self.project.folder)
        return measure(case, there, micro_batches=micro_batches, time_limit=left, on_output=self.on_output)

    def _unmeasured(self, case: Case, error: AutoaccumError) -> Verdict:
        """Return the verdict for an error, with the advice to delete an entry that is no longer guarded.

        A usage error in a workload that a lock or `pyproject.toml` names is not a usage error of the command: the case
        could not be measured.
        """
        is_usage, hint = error.exit_code == UsageError.exit_code, error.hint or ""
        if case in self.locked and case not in self.project.cases:
            hint = f"{hint or 'mend it'}, or delete its entry from {self.project.lock.name} if it is no longer guarded"
        return Verdict(
            case=case,
            outcome="too_large" if isinstance(error, DoesNotFitError) else "unmeasured",
            exit_code=NotMeasuredError.exit_code if is_usage and not self.is_named else error.exit_code,
            reasons=(error.message,),
            hint=hint,
            traceback=error.user_traceback if isinstance(error, WorkloadError) else None,
        )


def _without_savers(case: Case) -> Case:
    return dataclasses.replace(case, options=dataclasses.replace(case.options, savers=None))
