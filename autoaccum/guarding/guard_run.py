"""Guard cases: measure them, compare them with the lock or another revision, or lock them anew."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.checks import check_alone, read_seconds
from autoaccum.devices.budget import Deadline
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.errors import (
    AutoaccumError,
    LockFileError,
    MissingLockError,
    NotMeasuredError,
    UsageError,
    WorkloadError,
)
from autoaccum.files import check_output
from autoaccum.guarding.cases import CASE_FIELDS, Case, case_name, check_case, guard_command, make_case
from autoaccum.guarding.guard_result import (
    DEFAULT_TOLERANCE,
    CaseFinished,
    CaseStarted,
    Listener,
    Measurement,
    Report,
    Verdict,
)
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.measuring import measure, request_of
from autoaccum.guarding.project import LOCK_NAME, checked_out, find_folder, place_within, select_cases
from autoaccum.guarding.verdict import compare
from autoaccum.units import MemorySize


def guard(
    wanted: Sequence[Case],
    folder: Path,
    *,
    update: bool = False,
    baseline: str | None = None,
    tolerance: MemorySize = DEFAULT_TOLERANCE,
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
        folder: The folder of the lock and the workloads; child processes run in it.
        update: Plan again, and write the lock at the end instead of comparing with it. A case that could not be
            measured keeps its entry.
        baseline: Compare with this revision, measured here too. A lock then only names cases, and none is written.
        tolerance: How much memory may grow.
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
    lock = folder / LOCK_NAME
    is_whole = all(part.is_complete for part in wanted)
    locked = {} if baseline is not None and is_whole else _entries(lock, fresh=update and force)
    if not locked and not is_whole:
        readable = " that can be read" if lock.exists() else ""
        hint = f"lock it by `{guard_command(wanted[0], folder, '--update')}`"
        raise MissingLockError(f"there is no {LOCK_NAME}{readable} in {folder}", hint=hint)
    if update:
        check_output(lock, force=True)
    cases = select_cases(wanted, folder, locked)
    notify = on_event or (lambda event: None)
    verdicts = []
    with checked_out(folder, baseline) if baseline is not None else nullcontext() as there:
        run = _GuardRun(
            folder=folder,
            locked=locked,
            tolerance=tolerance,
            update=update,
            baseline=there,
            revision=baseline or "",
            on_output=on_output,
            deadline=Deadline(time_limit),
        )
        for number, case in enumerate(cases, 1):
            notify(CaseStarted(case))
            try:
                verdict = run.evaluate(case)
            except AutoaccumError as error:
                verdict = _unmeasured(case, error, is_named=any(part.workload for part in wanted))
            notify(CaseFinished(number, len(cases), verdict))
            verdicts.append(verdict)
    found = {verdict.case: verdict.now for verdict in verdicts if verdict.outcome == "locked" and verdict.now}
    if found:
        before = _entries(lock, fresh=force)  # Another process may have written it meanwhile.
        write_lock(lock, {**before, **found})
    relative = os.path.relpath(lock)
    shown = str(lock) if relative.startswith("..") else relative
    updated = shown if found else None
    return Report(verdicts=tuple(verdicts), against=baseline or shown, tolerance=tolerance, updated=updated)


def _entries(lock: Path, *, fresh: bool) -> dict[Case, Measurement]:
    """Return the entries of the lock; none where it cannot be read and a `fresh` one is to be written."""
    try:
        return read_lock(lock)
    except LockFileError:
        if not fresh:
            raise
        return {}


@dataclass(frozen=True, kw_only=True)
class _GuardRun:
    """What the cases of one call have in common; `baseline` is where the other `revision` is checked out."""

    folder: Path
    locked: Mapping[Case, Measurement]
    tolerance: MemorySize
    update: bool
    baseline: ImportPaths | None
    revision: str
    on_output: Callable[[str], None] | None
    deadline: Deadline

    def evaluate(self, case: Case) -> Verdict:
        """Measure a case, and compare it with its entry in the lock, or with the other revision.

        For an update it is planned again, and growth since the old entry is reported, but no failure.

        Raises:
            AutoaccumError: It cannot be measured.
        """
        command = "" if self.baseline else guard_command(case, self.folder, "--update")
        before = self._measure_baseline(case) if self.baseline else self.locked.get(case)
        if self.update:
            now = self._measure(case)
            verdict = Verdict(case=case, outcome="locked", before=before, now=now, warnings=now.warnings)
            if before is None:
                return verdict
            seen = compare(case, before, now, self.tolerance)
            return dataclasses.replace(verdict, explanation=seen.explanation, growths=seen.growths)
        if before is None:
            exists = (self.folder / LOCK_NAME).exists()
            return Verdict(
                case=case,
                outcome="unmeasured",
                exit_code=NotMeasuredError.exit_code,
                reasons=(f"{LOCK_NAME} has no entry for it" if exists else f"there is no {LOCK_NAME}",),
                hint="lock it on a branch that is known to be good",
                command=command,
            )
        now = self._measure(case, micro_batches=before.micro_batches)
        return compare(case, before, now, self.tolerance, command=command)

    def _measure_baseline(self, case: Case) -> Measurement:
        try:
            return self._measure(case, self.baseline)
        except AutoaccumError as error:
            raise NotMeasuredError(f"at {self.revision}: {error.message}", hint=error.hint) from error

    def _measure(
        self, case: Case, paths: ImportPaths | None = None, micro_batches: tuple[int, ...] | None = None
    ) -> Measurement:
        if self.deadline.is_over:
            raise NotMeasuredError("the time limit was reached before it was measured", hint="allow more time")
        there, left = paths or ImportPaths.of(self.folder), self.deadline.left_seconds
        return measure(case, there, micro_batches=micro_batches, time_limit=left, on_output=self.on_output)


def _unmeasured(case: Case, error: AutoaccumError, *, is_named: bool) -> Verdict:
    """Return the verdict for an error.

    A usage error in a workload that the lock names, not the command, is none of the command's: the case could not be
    measured.
    """
    is_usage = error.exit_code == UsageError.exit_code
    return Verdict(
        case=case,
        outcome="unmeasured",
        exit_code=NotMeasuredError.exit_code if is_usage and not is_named else error.exit_code,
        reasons=(error.message,),
        hint=error.hint or "",
        traceback=error.user_traceback if isinstance(error, WorkloadError) else None,
    )


def check_fits(workload: str, folder: Path, /, **given: Any) -> str:
    """Measure a case, and return why it does not fit; empty if it fits.

    Args:
        workload: An absolute file, with `:name` where it has one; or a module.
        folder: The folder from which a lock is looked for, upwards: its folder is the workload's.
        given: Fields of `Case` and of its options.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: It cannot be measured.
        DoesNotFitError: Not even one sample fits.
    """
    unknown = sorted(given.keys() - {*CASE_FIELDS[1:]})
    if unknown:
        takes = ", ".join("limit" if name == "memory" else name for name in CASE_FIELDS[1:])
        raise UsageError(f"there is no argument {unknown[0]!r}", hint=f"take {takes}")
    folder = find_folder(folder)
    try:
        reference = place_within(folder, workload, folder)
    except UsageError:  # A file outside of it has its whole path as its name.
        reference = workload
    case = check_case(make_case(workload=reference, **given))
    schedule = None if case.micro_batch is None else request_of(case).schedule(case.micro_batch).micro_batches
    measured = measure(case, ImportPaths.of(folder), micro_batches=schedule)
    if measured.fits:
        return ""
    fitting = f"the largest that fits is {measured.largest}" if measured.largest else "not even 1 fits"
    return f"{case_name(case)}: {measured.shortfall}; {fitting}"
