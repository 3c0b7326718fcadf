"""Requests to a child that runs trials, its measurements, and the records of trials made from them."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.child.failures import ChildDied, Failure
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.options import Reduce
from autoaccum.simulation.trace_records import Phase
from autoaccum.units import format_bytes

if TYPE_CHECKING:
    from autoaccum.sources.spec import Workload

_MOST_GROWN_SHARE, _LEAST_GROWTH = 0.75, 1.25
"""Sizes grow to three quarters of the expected ceiling, each by a quarter at least."""
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The memory that a job took of its device.

    Attributes:
        peak_reserved_bytes: The peak, as the limit counts memory; None if not measured.
        peak_allocated_bytes: The peak of the bytes that tensors held; None if the device does not count them.
        shared_bytes: The part that is shared memory, which no limit stops.
        retries: How often the allocator released its cache and tried again; None if it has no cache.
    """

    peak_reserved_bytes: int | None
    peak_allocated_bytes: int | None = None
    shared_bytes: int = 0
    retries: int | None = None


def without_evaluation_retries(reading: Reading, around: Sequence[Reading]) -> Reading:
    """Return `reading` without the retries between the first and the last of the readings `around` the evaluation.

    An evaluation finds the update's memory in the cache, and the next update the evaluation's, so that the allocator
    may have to release it. That is once per evaluation, which makes no micro-batch slow.

    >>> before, behind, end = (Reading(peak_reserved_bytes=9, retries=retries) for retries in (1, 4, 5))
    >>> without_evaluation_retries(end, [before, behind]).retries
    2
    """
    if len(around) < 2 or reading.retries is None:
        return reading
    between = (around[-1].retries or 0) - (around[0].retries or 0)
    return replace(reading, retries=max(0, reading.retries - between))


@dataclass(frozen=True, kw_only=True)
class TrialMeasurement:
    """The measurements of one trial, by the process that ran it.

    Attributes:
        seconds: Its wall time.
        reading: The memory that it took.
        failure: The failure that ended it; None: it ran to its end.
        phase: The phase in which it failed.
        parts: The parts of its last update, if its micro-batches grew.
        peaks: As `Trial.peaks`.
        host_bytes: As `Trial.host_bytes`.
    """

    seconds: float
    reading: Reading
    failure: Failure | None = None
    phase: Phase | None = None
    parts: tuple[int, ...] = ()
    peaks: tuple[tuple[int, int], ...] = ()
    host_bytes: int | None = None


def record_trial(measured: TrialMeasurement, limit_bytes: int, about: Mapping[str, Any]) -> Trial:
    """Return the record of a trial that was held to `limit_bytes`, with the known fields `about`."""
    reading, failure = measured.reading, measured.failure
    fields = {
        **about,
        "peak_reserved_bytes": reading.peak_reserved_bytes,
        "peak_allocated_bytes": reading.peak_allocated_bytes,
        "allocator_retries": reading.retries,
        "seconds": measured.seconds,
        "peaks": measured.peaks,
        "host_bytes": measured.host_bytes,
    }
    if measured.parts:
        fields["parts"] = measured.parts
    if failure is not None:
        return Trial(phase=measured.phase, **vars(failure), **fields)
    peak, shared = reading.peak_reserved_bytes or 0, reading.shared_bytes
    if shared and peak > limit_bytes:
        held = f"{format_bytes(peak)}, {format_bytes(shared)} of it shared memory, which no limit stops"
        return Trial(outcome="oom", phase="update", message=f"it ran, but held {held}", **fields)
    if reading.retries:
        times = "once" if reading.retries == 1 else f"{reading.retries} times"
        message = f"it ran, but the allocator released its cache and tried again {times}"
        return Trial(outcome="tight", message=message, **fields)
    if peak > limit_bytes and reading.retries is None:
        # The kernel has held it to the limit; its count of resident pages is some 100 KiB coarse.
        fields["peak_reserved_bytes"] = limit_bytes
    return Trial(outcome="ok", **fields)


def record_death(death: ChildDied, about: Mapping[str, Any]) -> Trial:
    """Return the record of a trial in which the child died."""
    message = f"micro-batch {max(about['parts'])}: the trial's process {death}"
    if death.out_of_memory:
        return Trial(outcome="oom", message=message, seconds=death.seconds, **about)
    timed_out = death.kind == "limit"
    message += ": raise --trial-limit" if timed_out else ""
    return Trial(
        outcome="error",
        message=message,
        blames="measurement",
        seconds=death.seconds,
        timed_out=timed_out,
        crashed=death.number in _FAULTS,
        **about,
    )


def next_growing_size(peaks: Sequence[tuple[int, int]], least: int, most: int, limit_bytes: int) -> int | None:
    """Return the size to follow the last of `peaks`, a multiple of `least`; None if larger ones would say little more.

    Sizes double, up to a share of the size at which the line through the last peaks reaches the limit.

    >>> next_growing_size([(1, 20), (2, 30)], 1, 64, 100), next_growing_size([(1, 20), (2, 60)], 1, 64, 100)
    (4, None)
    """
    size, peak = peaks[-1]
    following = 2 * size
    if len(peaks) > 1 and peak > peaks[-2][1]:
        slope = (peak - peaks[-2][1]) / (size - peaks[-2][0])
        following = min(following, int(_MOST_GROWN_SHARE * (size + (limit_bytes - peak) / slope)))
    following = min(following - following % least, most)
    return following if following >= _LEAST_GROWTH * size else None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The facts that a budget is chosen by (`Meter.begin`), or the reason why the device cannot be used."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadWorkload(Request[Loaded]):
    """Load the workload, and make the device ready; the fields are those of `TrialSettings`."""

    device: str
    paths: ImportPaths
    reference: str
    share: int
    options: Mapping[str, Any]
    pickled: str | None = None

    doing = "loading the workload"


@dataclass(frozen=True, kw_only=True)
class Inspect(Request[Inspection]):
    """Check the workload by an update from a small batch; `savers` replace the workload's, if given."""

    savers: tuple[str, ...] | None = None

    doing = "building the model and checking an update of it"

    def replaced(self, workload: Workload) -> Workload:
        """Return the workload with these savers in place of its own."""
        return workload if self.savers is None else replace(workload, savers=self.savers)


@dataclass(frozen=True, kw_only=True)
class PartsRequest(Request[Reply]):
    """A job that is an update, and another one by `parts`: micro-batch sizes, in samples.

    `joined`: the parts need each other, and every update runs all of them. `savers` replace the workload's,
    if given. `reduce`: when FSDP2 sums gradients; None: as the Accumulator does by default. `draw`: as
    `Inspection.draw`.
    """

    parts: tuple[int, ...]
    joined: bool = False
    reduce: Reduce | None = None
    savers: tuple[str, ...] | None = None
    draw: str | None = None

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        return f"micro-batch {max(self.parts)}"

    def replaced(self, workload: Workload) -> Workload:
        """Return the workload with these savers in place of its own."""
        return workload if self.savers is None else replace(workload, savers=self.savers)


@dataclass(frozen=True, kw_only=True)
class RunTrial(PartsRequest[TrialMeasurement]):
    """Run a trial of `parts` under a limit on memory; if it `grows`, `parts` are the least size and the largest.

    `limit_seconds` is the time by which it is ended.
    """

    limit_bytes: int
    limit_seconds: float
    grows: bool = False


@dataclass(frozen=True, kw_only=True)
class TimeUpdate(Request[float]):
    """Make an update; the reply is how many seconds it took."""

    micro_batch: int

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        return f"an update in micro-batches of {self.micro_batch}"
