"""What a study tells while it goes on: small frozen records. The planner's own events come in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoaccum.tuning.records import Facts, Row, Setting, Space, Speed, Throughput


@dataclass(frozen=True)
class StudyOpened:
    """The workload was described, and the study is there: its name, its storage, and the trials finished already."""

    facts: Facts
    name: str
    storage: str
    finished: int
    trials: int


@dataclass(frozen=True)
class SpeedMeasured:
    """One micro-batch size was timed."""

    speed: Speed


@dataclass(frozen=True)
class SearchBegan:
    """Trials come next; `remembered` is whether the throughput was measured before."""

    space: Space
    throughput: Throughput
    remembered: bool


@dataclass(frozen=True)
class TrialBegan:
    """A trial trains from now on; `confirms` as in `Row`."""

    number: int
    setting: Setting
    seed: int
    confirms: int | None = None


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
class Noted:
    """A warning, as a sentence."""

    text: str


Listener = Callable[[Any], Any]
"""Given every event, and the planner's while it plans."""
