"""`guard`: every case that is asked for is measured and compared, with the lock or another revision, or locked."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from autoaccum.devices.checkout import Checkout
from autoaccum.errors import AutoaccumError, LockFileError, MissingLockError, NotMeasuredError, UsageError
from autoaccum.guarding.baseline import check_there, checked_out
from autoaccum.guarding.cases import Case
from autoaccum.guarding.comparing import compare, unmeasured
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.measuring import measure
from autoaccum.guarding.project import Project, select_cases
from autoaccum.guarding.records import (
    CaseFinished,
    CaseStarted,
    CheckedOut,
    Event,
    Judgement,
    Listener,
    Measured,
    Measurement,
    Report,
    Tolerance,
)
from autoaccum.planning.files import check_output

_MOST_AT_ONCE = 2
"""Simulations: each takes a processor and the memory of a PyTorch."""

IsStopped = Callable[[], bool]


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

    What cannot be measured or compared is a judgement of its own, `unmeasured`, and ends none of the others. Ctrl-C
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
    allowed = tolerance or project.tolerance or Tolerance()
    is_whole = all(part.is_whole for part in wanted)
    locked = {} if baseline is not None and is_whole else _entries(project, fresh=update and force)
    known = (*project.cases, *locked)
    if not known and not is_whole:
        raise _nothing_known(wanted, project, baseline)
    if update:
        check_output(project.lock, force=True, way_out="name another by --lock")
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
            judgements = round_.judge_all(cases, partial(round_.compare_revisions, there, baseline))
        return Report(judgements=judgements, against=baseline, tolerance=allowed)
    judgements = round_.judge_all(cases, round_.relock if update else round_.compare_with_lock)
    found = {one.case: one.now for one in judgements if one.outcome == "locked" and one.now is not None}
    if found:
        before = _entries(project, fresh=force)  # Another guard may have written it meanwhile.
        write_lock(project.lock, {**before, **found})
    lock = _from_here(project.lock)
    return Report(judgements=judgements, against=lock, tolerance=allowed, updated=lock if found else None)


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
    """One round over several cases: what goes wrong with one ends none of the others.

    `tell` and `on_output` are called by one thread at a time; `deadline` is by `time.monotonic`.
    """

    project: Project
    locked: Mapping[Case, Measurement]
    tolerance: Tolerance
    is_named: bool
    tell: Listener
    on_output: Callable[[str], None] | None
    deadline: float | None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge_all(self, cases: Sequence[Case], judge: Callable[[Case, IsStopped], Judgement]) -> tuple[Judgement, ...]:
        """The judgements of all cases, in their order; simulated ones are measured two at a time.

        Raises:
            KeyboardInterrupt: As it came; every process has ended.
        """

        def told(number: int, case: Case, is_stopped: IsStopped) -> Judgement:
            self._tell(CaseStarted(case, number, len(cases)))
            try:
                judgement = judge(case, is_stopped)
            except AutoaccumError as error:
                judgement = self._unmeasured(case, error)
            self._tell(CaseFinished(number, len(cases), judgement))
            return judgement

        jobs = [partial(told, number, case) for number, case in enumerate(cases, 1)]
        beside = [index for index, case in enumerate(cases) if case.options.gpu is not None]
        found = dict(zip(beside, _run_side_by_side([jobs[index] for index in beside]), strict=True))
        for index in set(range(len(cases))) - found.keys():
            found[index] = jobs[index](lambda: False)
        return tuple(found[index] for index in range(len(cases)))

    def compare_with_lock(self, case: Case, is_stopped: IsStopped) -> Judgement:
        """Measure the locked schedule again, as it stands, and compare."""
        lock, command = self.project.lock, self.project.command(case, "--update")
        if case in self.locked:
            now = self._measure(case, is_stopped, micro_batches=self.locked[case].micro_batches)
            return compare(case, self.locked[case], now, self.tolerance, command=command)
        return Judgement(
            case=case,
            outcome="unmeasured",
            exit_code=NotMeasuredError.exit_code,
            reasons=(f"{lock.name} has no entry for it" if lock.exists() else f"there is no {lock.name}",),
            hint="lock what it takes now, on a branch that is right",
            command=command,
        )

    def relock(self, case: Case, is_stopped: IsStopped) -> Judgement:
        """Plan and measure anew, for an entry; what grew since the old one is told, and is no fault."""
        now, before = self._measure(case, is_stopped), self.locked.get(case)
        judgement = Judgement(case=case, outcome="locked", before=before, now=now.measurement, warnings=now.warnings)
        if before is None:
            return judgement
        seen = compare(case, before, now, self.tolerance)
        return dataclasses.replace(judgement, explanation=seen.explanation, growths=seen.growths)

    def compare_revisions(self, there: Checkout, revision: str, case: Case, is_stopped: IsStopped) -> Judgement:
        """Measure in both, and compare as with a lock."""
        try:
            check_there(there, case.workload, revision)
            before = self._measure(case, is_stopped, there).measurement
        except AutoaccumError as error:
            raise NotMeasuredError(f"at {revision}: {error.message}", hint=error.hint) from error
        now = self._measure(case, is_stopped, micro_batches=before.micro_batches)
        return compare(case, before, now, self.tolerance)

    def _measure(
        self,
        case: Case,
        is_stopped: IsStopped,
        checkout: Checkout | None = None,
        micro_batches: tuple[int, ...] | None = None,
    ) -> Measured:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise NotMeasuredError("the limit on time was over before it was measured", hint="allow more")
        return measure(
            case,
            checkout or Checkout(self.project.folder),
            micro_batches=micro_batches,
            time_limit=left,
            is_stopped=is_stopped,
            on_output=None if self.on_output is None else self._pass_on,
        )

    def _unmeasured(self, case: Case, error: AutoaccumError) -> Judgement:
        """That a case cannot be measured, and what to do about an entry that was left behind."""
        told = unmeasured(case, error, called=self.is_named)
        if case not in self.locked or case in self.project.cases:
            return told
        way_out = f"delete its entry from {self.project.lock.name} if it is guarded no more"
        return dataclasses.replace(told, hint=f"{told.hint or 'mend it'}, or {way_out}")

    def _tell(self, event: Event) -> None:
        with self._lock:
            self.tell(event)

    def _pass_on(self, line: str) -> None:
        assert self.on_output is not None
        with self._lock:
            self.on_output(line)


def _run_side_by_side(jobs: Sequence[Callable[[IsStopped], Judgement]]) -> list[Judgement]:
    """The results of all jobs, in their order; two run at a time where there are the processors for it.

    Each gets a function that tells whether it is to stop: after Ctrl-C, or an error of another one. It does so soon,
    by KeyboardInterrupt.

    Raises:
        BaseException: What a job raised first; the others have ended by then.
    """
    at_once = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)), len(jobs))
    if at_once < 2:
        return [job(lambda: False) for job in jobs]
    stop = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(job, stop.is_set) for job in jobs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise


def _from_here(path: Path) -> str:
    """A path as it is shown: relative to the current folder, where it lies within."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown
