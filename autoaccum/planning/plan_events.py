"""The events of a plan: small frozen records for progress displays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.explanation import MemoryReport
from autoaccum.messages import Message


@dataclass(frozen=True)
class Doing:
    """Something begins that takes a while.

    Attributes:
        what: `loading` the workload, which imports PyTorch; `tracing` small sizes to forecast peaks; `timing` updates;
            `explaining` the memory of the schedule, which is proved.
        subject: The workload that is loaded, or the micro-batch that is timed.
    """

    what: Literal["loading", "tracing", "timing", "explaining"]
    subject: str | int = ""


@dataclass(frozen=True)
class Inspected:
    """The workload was loaded and checked; trials come next.

    Attributes:
        inspection: What is known of the workload.
        device: The name of the device.
        limit_bytes: The budget of every trial.
        cap: The largest size to try, in samples.
        predicted: Whether trials are predicted rather than run.
    """

    inspection: Inspection
    device: str
    limit_bytes: int
    cap: int
    predicted: bool = False


@dataclass(frozen=True)
class SaversTried:
    """Savers are tried, of which a plan is to choose; `trial` is None when it begins."""

    savers: tuple[str, ...]
    trial: Trial | None = None


@dataclass(frozen=True)
class ValueTried:
    """A value of `PlanRequest.solve` is tried; `trial` is None when it begins, else maybe a prediction."""

    name: str
    value: int
    predicted: bool
    trial: Trial | None = None


@dataclass(frozen=True)
class TracedAlone:
    """The search will take longer: every size is traced by itself, and `reason` says why."""

    reason: Message


@dataclass(frozen=True)
class TrialStarted:
    """A trial starts.

    Attributes:
        number: Its number, counted from 1.
        parts: Its micro-batches, in samples.
    """

    number: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class TrialFinished:
    """The trial with this number ended."""

    number: int
    trial: Trial


@dataclass(frozen=True)
class Explained:
    """The memory of the schedule was explained, in more detail than the plan keeps."""

    report: MemoryReport


Event = Doing | Inspected | SaversTried | ValueTried | TracedAlone | TrialStarted | TrialFinished | Explained
Listener = Callable[[Event], None]
