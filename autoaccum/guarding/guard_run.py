"""Guard cases: measure them, compare them with the lock or another revision, or lock them anew."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autoaccum.checks import check_alone, read_seconds
from autoaccum.devices.child.import_paths import Checkout
from autoaccum.errors import (
    AutoaccumError,
    LockFileError,
    MissingLockError,
    NotMeasuredError,
    UsageError,
    WorkloadError,
)
from autoaccum.files import check_output
from autoaccum.guarding.cases import CASE_FIELDS, Case, case_name, check_case, make_case
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
from autoaccum.guarding.measuring import describe_shortfall, measure, request_of
from autoaccum.guarding.project import Project, checked_out, find_project, select_cases
from autoaccum.guarding.verdict import compare
from autoaccum.sources.module_names import mask_numbers
from autoaccum.units import precise_bytes

_MOST_LINES = 5
"""Lines of a message for each table."""


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
        """Measure the schedule of `before`, and compare."""
        now = self._measure(case, micro_batches=before.micro_batches)
        return compare(case, before, now, self.tolerance, command=command)

    def _measure(
        self, case: Case, checkout: Checkout | None = None, micro_batches: tuple[int, ...] | None = None
    ) -> Measurement:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise NotMeasuredError("the time limit was reached before it was measured", hint="allow more time")
        there = checkout or Checkout(self.project.folder)
        return measure(case, there, micro_batches=micro_batches, time_limit=left, on_output=self.on_output)

    def _unmeasured(self, case: Case, error: AutoaccumError) -> Verdict:
        """Return the verdict for an error.

        A usage error in a workload that a lock or `pyproject.toml` names is not a usage error of the command: the case
        could not be measured.
        """
        is_usage = error.exit_code == UsageError.exit_code
        return Verdict(
            case=case,
            outcome="unmeasured",
            exit_code=NotMeasuredError.exit_code if is_usage and not self.is_named else error.exit_code,
            reasons=(error.message,),
            hint=error.hint or "",
            traceback=error.user_traceback if isinstance(error, WorkloadError) else None,
        )


def check_fits(workload: str, folder: Path, /, **given: Any) -> str:
    """Measure a case, and return why it does not fit; empty if it fits.

    Args:
        workload: An absolute file, with `:name` where it has one; or a module.
        folder: The folder from which the project is looked for, upwards.
        given: Fields of `Case` and of its options.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: It cannot be measured.
        DoesNotFitError: Not even one sample fits.
    """
    unknown = sorted(given.keys() - {*CASE_FIELDS[1:]})
    if unknown:
        takes = ", ".join("limit" if name == "memory" else name for name in CASE_FIELDS[1:])
        raise UsageError(f"there is no argument {unknown[0]!r}", hint=f"take {takes}")
    project = find_project(folder)
    try:
        reference = project.reference(workload, project.folder)
    except UsageError:  # A file outside of the project has its whole path as its name.
        reference = workload
    case = check_case(make_case(workload=reference, **given))
    schedule = None if case.micro_batch is None else request_of(case).schedule(case.micro_batch).micro_batches
    measured = measure(case, Checkout(project.folder), micro_batches=schedule)
    return "" if measured.fits else "\n".join(_shortfall_lines(case, measured))


def _shortfall_lines(case: Case, measured: Measurement) -> Iterator[str]:
    """Say what a schedule needs that does not fit, and where the memory goes, if that was recorded."""
    fitting = f"the largest that fits is {measured.largest}" if measured.largest else "not even 1 fits"
    needed = f"micro-batch {measured.micro_batch} does not fit: {describe_shortfall(measured)}"
    yield f"{case_name(case)}: {needed}; {fitting}"
    held, modules = Counter[str](), Counter[str]()
    for category, size in measured.categories.items():
        held[category.replace("_", " ")] = size
    for holding in measured.holdings:
        if holding.module:
            name = holding.module if holding.module.isdecimal() else mask_numbers(holding.module)
            modules[f"{holding.category.replace('_', ' ')} of {name}"] += holding.bytes
    for title, sizes in ((f"where the memory goes, in {measured.phase}:", held), ("the most by module:", modules)):
        if sizes:
            yield title
            yield from (f"  {precise_bytes(size):>10}  {what}" for what, size in sizes.most_common(_MOST_LINES))
