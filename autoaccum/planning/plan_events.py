"""What a planner tells while it works: small frozen records, for whoever draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.explanation import Account


@dataclass(frozen=True)
class Loading:
    """The workload is being loaded and checked: PyTorch is imported, which takes its time."""

    reference: str


@dataclass(frozen=True)
class Inspected:
    """The workload was loaded and checked; trials come next.

    Each has a budget of `limit_bytes`; no size above `cap` samples is tried; `predicted`: nothing runs.
    """

    inspection: Inspection
    device: str
    limit_bytes: int
    cap: int
    predicted: bool = False


@dataclass(frozen=True)
class Tracing:
    """Small sizes are traced on a simulated card, to know what peaks to expect of larger ones."""


@dataclass(frozen=True)
class TrialStarted:
    """A trial begins.

    The `number` counts from 1; `confirming`: it runs the plan's own schedule from a clean state; `limit_bytes`: the
    budget it is held to, where that is another than the plan's.
    """

    number: int
    parts: tuple[int, ...]
    confirming: bool
    limit_bytes: int | None = None


@dataclass(frozen=True)
class TrialFinished:
    """A trial ended, one way or another."""

    number: int
    trial: Trial
    confirming: bool


@dataclass(frozen=True)
class Scheduled:
    """A schedule was made of the largest size that ran; it is confirmed next."""

    schedule: Schedule
    largest_fit: int


@dataclass(frozen=True)
class ExplanationStarted:
    """The schedule is proved; where its memory goes is found out next."""


@dataclass(frozen=True)
class Explained:
    """Where the memory of the schedule goes: more than the plan keeps."""

    account: Account


Event = Loading | Inspected | Tracing | TrialStarted | TrialFinished | Scheduled | ExplanationStarted | Explained
Listener = Callable[[Event], None]
