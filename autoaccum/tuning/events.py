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
    """A trial's worker has died; its parameters wait to be taken up again."""

    number: int
    worker: str


@dataclass(frozen=True)
class WaitingForOthers:
    """Nothing is left to begin, and other workers still run trials."""

    running: tuple[int, ...]


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
