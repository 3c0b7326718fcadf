"""Cases against the lock: compared with it, or written into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoaccum.devices.checkout import Checkout
from autoaccum.errors import MissingLockError
from autoaccum.guarding.comparing import compare
from autoaccum.guarding.judging import incomparable, not_locked
from autoaccum.guarding.lock_file import Lock, read_lock
from autoaccum.guarding.project import Project
from autoaccum.guarding.records import Case
from autoaccum.guarding.rounds import Measure
from autoaccum.guarding.selection import find_moved, guard_words, is_gone
from autoaccum.guarding.tolerance import Tolerance
from autoaccum.guarding.verdicts import Judgement


@dataclass(frozen=True)
class Locked:
    """A lock, and what of it is asked for where.

    Attributes:
        lock: What is locked; empty where there is no file.
        project: Whose.
        there: Whether there is a file.
        salvaged: The cases that a file names which cannot be read.
    """

    lock: Lock
    project: Project
    there: bool = True
    salvaged: tuple[Case, ...] = ()

    @classmethod
    def read(cls, project: Project) -> Locked:
        """The lock of a project.

        Raises:
            LockFileError: It cannot be read.
        """
        try:
            return cls(read_lock(project.lock), project)
        except MissingLockError:
            return cls(Lock(), project, there=False)

    @property
    def named(self) -> tuple[Case, ...]:
        """The cases that `pyproject.toml` or the lock names."""
        return tuple(dict.fromkeys((*self.project.cases, *self.lock.entries, *self.salvaged)))

    @property
    def gone(self) -> tuple[Case, ...]:
        """The cases whose file is there no more."""
        return tuple(case for case in self.lock.entries if is_gone(case, self.project.folder))

    def name_of(self, case: Case) -> Case | None:
        """Under which case the lock has it: itself, or one of a file that was moved; None where it has not."""
        return case if case in self.lock.entries else find_moved(case, self.gone)

    def without_moved(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        """The cases without those that others of them stand for, since their file was moved."""
        stood_for = {self.name_of(case) for case in cases if case not in self.lock.entries}
        return tuple(case for case in cases if case not in stood_for)

    def check(self, case: Case, measure: Measure, tolerance: Tolerance) -> Judgement:
        """Measure the locked schedule again, as it stands, and compare.

        Raises:
            AutoaccumError: It cannot be measured.
        """
        name, command = self.name_of(case), guard_words(case, self.project.folder, *self.project.options, "--update")
        if name is None:
            path = self.project.lock.name
            return not_locked(case, f"{path} has no entry for it" if self.there else f"there is no {path}", command)
        before = self.lock.entries[name]
        now = measure(Checkout(self.project.folder), before.micro_batches)
        judgement = incomparable(case, before, now, command) or compare(case, before, now, tolerance, command=command)
        notes = () if name == case else (_moved(name, case, command),)
        return dataclasses.replace(judgement, notes=(*judgement.notes, *notes))

    def relock(self, case: Case, measure: Measure, tolerance: Tolerance) -> Judgement:
        """Plan and measure anew, for an entry; what grew since the old one is told, and is no fault.

        Raises:
            AutoaccumError: It cannot be measured.
        """
        name = self.name_of(case)
        now = measure(Checkout(self.project.folder))
        judgement = Judgement(case=case, outcome="locked", now=now.measurement, warnings=now.warnings, notes=now.notes)
        if name is None:
            return judgement
        before = self.lock.entries[name]
        if now.measurement.micro_batches == before.micro_batches and incomparable(case, before, now, "") is None:
            seen = compare(case, before, now, tolerance, command="")
            judgement = dataclasses.replace(judgement, explanation=seen.explanation, growths=seen.growths)
        notes = () if name == case else (f"it takes the place of the entry for {name.workload}",)
        return dataclasses.replace(judgement, before=before, notes=(*judgement.notes, *notes))

    def relocked(self, judgements: Iterable[Judgement], *, prune: bool) -> Lock:
        """The lock with what was measured in place of what it had, and the rest as it is.

        Args:
            judgements: Of `relock`, and of what could not be measured.
            prune: Drop what `pyproject.toml` does not name.
        """
        found = {judgement.case: judgement.now for judgement in judgements if judgement.outcome == "locked"}
        replaced = {self.name_of(case) for case in found}
        kept = {
            case: measurement
            for case, measurement in self.lock.entries.items()
            if case not in replaced and (case in self.project.cases or not prune)
        }
        return Lock({**kept, **{case: now for case, now in found.items() if now is not None}})


def _moved(name: Case, case: Case, command: str) -> str:
    return (
        f"{name.workload} is not there any more: compared with its entry, as only the file's name differs; "
        f"to rename the entry to {case.workload}: {command}"
    )
