"""Guard cases: measure them, compare them with the lock or another revision, or lock them anew."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.checks import check_alone, read_seconds
from autoaccum.devices.budget import Deadline
from autoaccum.devices.child.import_paths import ImportPaths
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
from autoaccum.guarding.cases import CASE_FIELDS, Case, case_name, check_case, check_complete, guard_command, make_case
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
from autoaccum.guarding.measuring import measure
from autoaccum.guarding.project import LOCK_NAME, checked_out, find_folder, place_within, select_cases
from autoaccum.guarding.verdict import compare
from autoaccum.messages import message
from autoaccum.units import MemorySize


def guard(
    wanted: Sequence[Case],
    folder: Path,
    *,
    listed: Sequence[Case] = (),
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
        listed: Complete cases, as in a lock of `folder`, that are known beside those that are locked.
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
    is_complete = all(case.is_complete for case in wanted)
    locked = {} if baseline is not None and is_complete else _read_entries(lock, replaced=update and force)
    known = dict.fromkeys((*locked, *listed))
    if not known and not is_complete:
        readable = " that can be read" if lock.exists() else ""
        hint = f"lock it by `{guard_command(wanted[0], folder, '--update')}`"
        raise MissingLockError(f"there is no {LOCK_NAME}{readable} in {folder}", hint=hint)
    if update:
        check_output(lock, force=True)
    cases = select_cases(wanted, folder, known)
    notify = on_event or (lambda event: None)
    verdicts = []
    with nullcontext() if baseline is None else checked_out(folder, baseline) as paths:
        run = _GuardRun(
            folder=folder,
            locked=locked,
            tolerance=tolerance,
            update=update,
            baseline=paths,
            revision=baseline,
            on_output=on_output,
            deadline=Deadline(time_limit),
        )
        for number, case in enumerate(cases, 1):
            notify(CaseStarted(case))
            try:
                verdict = run.judge(case)
            except AutoaccumError as error:
                verdict = _unmeasured(case, error, is_named=any(part.workload for part in wanted))
            notify(CaseFinished(number, len(cases), verdict))
            verdicts.append(verdict)
    measured = {verdict.case: verdict.now for verdict in verdicts if verdict.outcome == "locked" and verdict.now}
    if measured:  # Another process may have written the lock meanwhile.
        write_lock(lock, {**_read_entries(lock, replaced=force), **measured})
    relative = os.path.relpath(lock)
    shown = str(lock) if relative.startswith("..") else relative
    updated = shown if measured else None
    return Report(verdicts=tuple(verdicts), against=baseline or shown, tolerance=tolerance, updated=updated)


def _read_entries(lock: Path, *, replaced: bool) -> dict[Case, Measurement]:
    """Return the entries of the lock; none where it cannot be read and is to be `replaced`."""
    try:
        return read_lock(lock)
    except LockFileError:
        if not replaced:
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
    revision: str | None
    on_output: Callable[[str], None] | None
    deadline: Deadline

    def judge(self, case: Case) -> Verdict:
        """Measure a case, and compare it with its entry in the lock, or with the other revision.

        For an update it is planned again, and growth since the old entry is reported, but no failure.

        Raises:
            AutoaccumError: It cannot be measured.
        """
        command = "" if self.baseline else guard_command(case, self.folder, "--update")
        before = self._measure_baseline(case, self.baseline) if self.baseline else self.locked.get(case)
        if before is None and not self.update:
            return Verdict(
                case=case,
                outcome="unmeasured",
                exit_code=NotMeasuredError.exit_code,
                reasons=(message("not_locked", lock=LOCK_NAME, exists=(self.folder / LOCK_NAME).exists()),),
                hint=message("lock_on_good_branch"),
                command=command,
            )
        locked = None if self.update else before
        now, lines = self._measure(case, ImportPaths.of(self.folder), locked)
        if before is None:
            return Verdict(case=case, outcome="locked", now=now)
        verdict = compare(case, before, now, self.tolerance, command=command, lines=lines)
        if not self.update:
            return verdict
        return dataclasses.replace(verdict, outcome="locked", exit_code=0, reasons=(), hint=None, command="")

    def _measure_baseline(self, case: Case, baseline: ImportPaths) -> Measurement:
        try:
            return self._measure(case, baseline)[0]
        except AutoaccumError as error:
            raise NotMeasuredError(f"at {self.revision}: {error.message}", hint=error.hint) from error

    def _measure(
        self, case: Case, paths: ImportPaths, locked: Measurement | None = None
    ) -> tuple[Measurement, Mapping[str, str]]:
        if self.deadline.is_over:
            raise NotMeasuredError("the time limit was reached before it was measured", hint="allow more time")
        limit = self.deadline.left_seconds
        return measure(case, paths, locked=locked, time_limit=limit, on_output=self.on_output)


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
        reasons=(message("error", error=error.code, text=error.message),),
        hint=message("error", error=error.code, text=error.hint) if error.hint else None,
        traceback=error.user_traceback if isinstance(error, WorkloadError) else None,
    )


def check_fits(workload: str, folder: Path, /, **given: Any) -> None:
    """Measure a case, which is to fit.

    Args:
        workload: An absolute file, with `:name` where it has one; or a module.
        folder: The folder from which a lock is looked for, upwards: its folder is the workload's.
        given: Fields of `Case` and of its options.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: It cannot be measured.
        DoesNotFitError: It does not fit.
    """
    unknown = sorted(given.keys() - {*CASE_FIELDS[1:]})
    if unknown:
        names = ", ".join("limit" if name == "memory" else name for name in CASE_FIELDS[1:])
        raise UsageError(f"there is no argument {unknown[0]!r}", hint=f"take {names}")
    folder = find_folder(folder)
    with suppress(UsageError):  # A file outside of it has its whole path as its name.
        workload = place_within(folder, workload, folder)
    case = check_case(make_case(workload=workload, **given))
    check_complete(case)
    try:
        measure(case, ImportPaths.of(folder))
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{case_name(case)}: {error.message}", hint=error.hint) from None
