"""Cases against the lock: compared with it, or written into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from autoaccum.devices.checkout import Checkout
from autoaccum.errors import LockFileError, MissingLockError, NotMeasuredError
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.asked.project import Project
from autoaccum.guarding.asked.selection import find_moved, guard_words, is_gone
from autoaccum.guarding.asked.tolerance import Tolerance
from autoaccum.guarding.judgements import Judgement
from autoaccum.guarding.locks.lock_file import Lock, read_lock, salvage_lock
from autoaccum.guarding.locks.lock_reader import WaysOut
from autoaccum.guarding.records import Case
from autoaccum.guarding.rounds import Measure
from autoaccum.guarding.verdict.comparing import compare
from autoaccum.guarding.verdict.judging import incomparable, not_locked


@dataclass(frozen=True)
class Locked:
    """A lock, and what of it is asked for where.

    Attributes:
        lock: What is locked; empty where there is no file.
        project: Whose.
        there: Whether there is a file.
        damaged: The cases of a file that cannot be read as a whole, of which `lock` has no figures.
    """

    lock: Lock
    project: Project
    there: bool = True
    damaged: tuple[Case, ...] = ()

    @classmethod
    def read(cls, project: Project) -> Locked:
        """The lock of a project.

        Raises:
            LockFileError: It cannot be read.
        """
        try:
            return cls(read_lock(project.lock, _ways_out(project)), project)
        except MissingLockError:
            return cls(Lock(), project, there=False)

    @classmethod
    def salvage(cls, project: Project) -> Locked:
        """What can be told of a lock that cannot be read as a whole.

        Raises:
            LockFileError: It has entries of which not even the case can be told, is cut off, or no content can be read.
        """
        found = salvage_lock(project.lock, _ways_out(project))
        if found.lost:
            which = " and ".join(found.lost)
            raise LockFileError(f"{project.lock}, {which} cannot be told, and would be lost", hint=_by_hand(project))
        return cls(Lock(found.entries), project, damaged=tuple(found.damaged))

    @property
    def named(self) -> tuple[Case, ...]:
        """The cases that `pyproject.toml` or the lock names."""
        return tuple(dict.fromkeys((*self.project.cases, *self.lock.entries, *self.damaged)))

    @property
    def gone(self) -> tuple[Case, ...]:
        """The cases whose file is there no more."""
        return tuple(case for case in self.lock.entries if is_gone(case, self.project.folder))

    def entry_of(self, case: Case) -> Case | None:
        """Under which case the lock has it: itself, or one of a file that was moved; None where it has not."""
        return case if case in self.lock.entries else find_moved(case, self.gone)

    def without_moved(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        """The cases without those that others of them stand for, since their file was moved."""
        stood_for = {self.entry_of(case) for case in cases if case not in self.lock.entries}
        return tuple(case for case in cases if case not in stood_for)

    def check(self, case: Case, measure: Measure, tolerance: Tolerance) -> Judgement:
        """Measure the locked schedule again, as it stands, and compare.

        Raises:
            AutoaccumError: It cannot be measured.
        """
        entry, command = self.entry_of(case), guard_words(case, self.project.folder, *self.project.options, "--update")
        if entry is None:
            path = self.project.lock.name
            return not_locked(case, f"{path} has no entry for it" if self.there else f"there is no {path}", command)
        before = self.lock.entries[entry]
        now = measure(Checkout(self.project.folder), before.micro_batches)
        judgement = incomparable(case, before, now, command) or compare(case, before, now, tolerance, command=command)
        return judgement if entry == case else _as_moved(judgement, entry, command)

    def relock(self, case: Case, measure: Measure, tolerance: Tolerance) -> Judgement:
        """Plan and measure anew, for an entry; what grew since the old one is told, and is no fault.

        Raises:
            AutoaccumError: It cannot be measured.
        """
        entry = self.entry_of(case)
        now = measure(Checkout(self.project.folder))
        judgement = Judgement(case=case, outcome="locked", now=now.measurement, warnings=now.warnings, notes=now.notes)
        if entry is None:
            return judgement
        before = self.lock.entries[entry]
        if now.measurement.micro_batches == before.micro_batches and incomparable(case, before, now, "") is None:
            seen = compare(case, before, now, tolerance, command="")
            judgement = dataclasses.replace(judgement, explanation=seen.explanation, growths=seen.growths)
        notes = () if entry == case else (f"it takes the place of the entry for {entry.workload}",)
        return dataclasses.replace(judgement, before=before, notes=(*judgement.notes, *notes))

    def check_kept(self, measured: Container[Case], *, prune: bool) -> None:
        """See whether an entry that cannot be read would be lost.

        Args:
            measured: The cases that are measured anew.
            prune: Whether those that `pyproject.toml` does not name are to go.

        Raises:
            NotMeasuredError: One would.
        """
        wanted = self.project.cases if prune else self.damaged
        lost = [case_name(case) for case in self.damaged if case in wanted and case not in measured]
        if lost:
            raise NotMeasuredError(
                f"{self.project.lock} stays as it is: its entry {' and '.join(lost)} cannot be read, and was not"
                " measured anew",
                hint=f"{_by_hand(self.project)}, or have all measured by "
                + _ways_out(self.project).command("--update", "--force"),
            )

    @property
    def unnamed(self) -> tuple[Case, ...]:
        """The entries that `pyproject.toml` does not name."""
        return tuple(case for case in self.lock.entries if case not in self.project.cases)

    def relocked(self, judgements: Iterable[Judgement], *, dropped: Container[Case], prune: bool) -> Lock:
        """The lock with what was measured in place of what it had, and the rest as it is.

        Args:
            judgements: Of `relock`, and of what could not be measured.
            dropped: Entries to leave out.
            prune: As in `check_kept`.

        Raises:
            NotMeasuredError: An entry that cannot be read would be lost, as it was not measured anew.
        """
        found = {judgement.case: judgement.now for judgement in judgements if judgement.outcome == "locked"}
        replaced = {self.entry_of(case) for case in found}
        self.check_kept(found, prune=prune)
        kept = {
            case: measurement
            for case, measurement in self.lock.entries.items()
            if case not in replaced and case not in dropped
        }
        return Lock({**kept, **{case: now for case, now in found.items() if now is not None}})


def _ways_out(project: Project) -> WaysOut:
    return WaysOut(project.options, named=bool(project.cases))


def _by_hand(project: Project) -> str:
    return (
        f"restore it, such as by `git checkout -- {project.lock.name}`, or delete the lines of such an entry to drop it"
    )


def _as_moved(judgement: Judgement, entry: Case, command: str) -> Judgement:
    note = f"{entry.workload} is not there any more: compared with its entry, as only the file's name differs"
    hint = judgement.hint or f"rename the entry to {judgement.case.workload}"
    return dataclasses.replace(judgement, notes=(*judgement.notes, note), hint=hint, command=command)
