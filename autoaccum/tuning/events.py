"""What a study tells while it goes on: small frozen records. The planner's own events come in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoaccum.tuning.facts import Facts
from autoaccum.tuning.records import Row, Speed, Throughput
from autoaccum.tuning.settings import Setting, Space


@dataclass(frozen=True)
class Described:
    """The workload was loaded, and its optimizer built, in a process of its own."""

    facts: Facts


@dataclass(frozen=True, kw_only=True)
class StudyOpened:
    """The study is there, new or to go on with.

    Attributes:
        name: Its name.
        storage: Where it is; passwords are left out.
        sampler: Which sampler, as a phrase with its seed.
        pruner: Which pruner, as a phrase.
        finished: Trials that are finished already.
        trials: How many there are to be in all.
        best: The least loss of those that are complete; None where none is.
    """

    name: str
    storage: str
    sampler: str
    pruner: str
    finished: int
    trials: int
    best: float | None = None


@dataclass(frozen=True)
class SpeedMeasured:
    """One micro-batch size was timed."""

    speed: Speed


@dataclass(frozen=True)
class ThroughputKnown:
    """All of them are, by now or from before."""

    throughput: Throughput
    remembered: bool


@dataclass(frozen=True)
class SearchBegan:
    """Trials come next."""

    space: Space


@dataclass(frozen=True)
class TrialBegan:
    """A trial trains from now on; `confirms` as in `Row`."""

    number: int
    setting: Setting
    seed: int
    confirms: int | None = None
    repeats: int | None = None
    own: bool = False


@dataclass(frozen=True)
class Reported:
    """A trial's loss on held-out data at a milestone."""

    number: int
    percent: int
    loss: float


@dataclass(frozen=True)
class TrialEnded:
    """A trial is finished, and kept."""

    row: Row


@dataclass(frozen=True)
class WorkerLost:
    """A run's worker has died.

    Attributes:
        number: Of the run; where it repeats a trial, in the study of confirmations.
        worker: Who ran it.
        confirms: As in `Row`.
        seed: That of the repetition; None where it is none.
        again: Whether its parameters wait to be taken up again: not where it had none, or too many died of them.
    """

    number: int
    worker: str
    confirms: int | None = None
    seed: int | None = None
    again: bool = True


@dataclass(frozen=True)
class WaitingForOthers:
    """Nothing is left to begin, and other workers still run trials.

    Attributes:
        running: Their numbers; where they repeat trials, in the study of confirmations.
        confirms: The trials of the search that they repeat; None: they are of the search.
    """

    running: tuple[int, ...]
    confirms: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Confirming:
    """The best few are repeated with other seeds: the numbers of their trials, and how many runs come."""

    trials: tuple[int, ...]
    runs: int


@dataclass(frozen=True)
class Printed:
    """A line that the workload printed."""

    line: str


@dataclass(frozen=True)
class Noted:
    """What a person should know, as a sentence."""

    text: str
    warns: bool = True


Listener = Callable[[Any], Any]
"""Given every event, and the planner's while it plans."""


def name_run(number: int, confirms: int | None, seed: int | None) -> str:
    """What a run is called: repetitions have numbers of their own, which nobody sees elsewhere.

    >>> name_run(3, None, 0), name_run(3, 8, 1)
    ('trial 3', 'the repetition of trial 8 with seed 1')
    """
    return f"trial {number}" if confirms is None else f"the repetition of trial {confirms} with seed {seed}"
