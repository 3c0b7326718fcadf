"""The last update of a recording beside its prediction: what is held at the peak, by module and operator."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import eq
from typing import Final

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.simulated.breakdown import MemoryBreakdown
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.errors import UsageError
from autoaccum.simulation.allocator.caching_allocator import LARGE_SEGMENT_BYTES
from autoaccum.simulation.allocator.recording import Recording, read_recording
from autoaccum.sources.module_names import mask_numbers
from autoaccum.units import KIB, format_parts

_UNCERTAINTY_SHARE: Final = 100
"""The hundredth of a peak by which it may be off, beside the workspaces that were not measured."""

_SMALLEST: Final = 64 * KIB
_NOT_PREDICTED: Final = "not predicted"
_CHANGES: Final = {"alloc": 1, "free_completed": -1}


@dataclass(frozen=True, order=True)
class Source:
    """What holds memory: its purpose, and the module and the operator of its allocation; or a recorded line alone."""

    category: str
    module: str = ""
    op: str = ""
    line: str = ""


@dataclass(frozen=True)
class SourceDifference:
    """What one source holds at the peaks of a recorded update and of the predicted one."""

    source: Source
    recorded_bytes: int
    predicted_bytes: int


@dataclass(frozen=True)
class RequestDifference:
    """A recorded request for memory, with its line, and the predicted one in its place, with its source."""

    recorded_bytes: int
    recorded_line: str
    predicted_bytes: int
    source: Source


@dataclass(frozen=True)
class Figure:
    """One figure of a recorded update, and of the predicted one; `uncertainty` is by how much it may differ."""

    recorded: int
    predicted: int
    uncertainty: int

    @property
    def agrees(self) -> bool:
        """Return whether the two differ by no more than the uncertainty."""
        return abs(self.recorded - self.predicted) <= self.uncertainty


@dataclass(frozen=True, kw_only=True)
class UpdateComparison:
    """A recorded update and its prediction.

    Attributes:
        snapshot: The file of the record, which has `events`; `card` is the simulated one.
        parts: The micro-batches of the update, in samples.
        held: The most bytes held in it.
        reserved: The most bytes reserved in it.
        first_difference: The first request that differs; None: all are equal.
        differences: The sources that hold memory at one of the peaks alone; the largest comes first.

    Requests of less than 64 KiB count in the figures only: loops differ in scalars.
    """

    snapshot: str = ""
    events: int = 0
    card: str = ""
    parts: tuple[int, ...]
    held: Figure
    reserved: Figure
    first_difference: RequestDifference | None
    differences: tuple[SourceDifference, ...]

    @property
    def agrees(self) -> bool:
        """Return whether both peaks agree."""
        return self.held.agrees and self.reserved.agrees


def compare_snapshot(
    snapshot: str | os.PathLike[str], device: SimulatedDevice, target_batch: int, micro_batch: int
) -> UpdateComparison:
    """Lay the last update of a snapshot beside that of the device's workload.

    Args:
        snapshot: The file.
        device: The card, with the workload and the options of the run.
        target_batch: Samples per update.
        micro_batch: The most samples that ran at once.

    Raises:
        UsageError: The file is no complete snapshot, or its end is no such update; or `micro_batch` is too large.
        WorkloadError, NotMeasuredError: The workload cannot be simulated.
    """
    if micro_batch > target_batch:
        raise UsageError(
            f"a micro-batch of {micro_batch} is more than the {target_batch} samples of an update",
            hint="give those of the recorded run (--micro-batch, --target-batch)",
        )
    recording = read_recording(snapshot)
    schedule = make_schedule(target_batch, micro_batch, multiple_of=device.inspect().multiple_of)
    breakdown, reserved_bytes = device.break_down(schedule.micro_batches, recording.settings)
    compared = compare_update(recording, breakdown, reserved_bytes)
    return replace(compared, snapshot=str(snapshot), events=len(recording.entries), card=device.name)


def compare_update(recording: Recording, breakdown: MemoryBreakdown, reserved_bytes: int) -> UpdateComparison:
    """Lay the end of a recording beside the last update of a labelled trace, whose reserved peak is `reserved_bytes`.

    The last requests of the recording are those of the update, as many as are predicted.

    Raises:
        UsageError: The record does not end with such an update.
    """
    trace, sizes, entries = breakdown.labelled.trace, breakdown.sized.sizes, recording.entries
    blocks = [event for event in trace.events[trace.last_update :] if event >= 0 and sizes[event] >= _SMALLEST]
    requests = [at for at, entry in enumerate(entries) if entry.action == "alloc" and entry.size >= _SMALLEST]
    last = requests[-len(blocks) :]
    common = Counter(entries[at].size for at in last) & Counter(sizes[block] for block in blocks)
    if not common or 2 * common.total() < len(blocks):
        raise _no_such_update(recording, trace.parts, len(blocks), len(requests))
    changes = (_CHANGES.get(entry.action, 0) * entry.size for entry in entries)
    recorded = list(accumulate(changes, initial=sum(recording.before.values())))
    reserved = list(accumulate((entry.reserved_bytes for entry in entries), initial=recording.reserved_before))
    start = last[0]
    peak = max(range(start + 1, len(recorded)), key=lambda at: (recorded[at], at))
    held = breakdown.held_bytes
    at = max(range(trace.last_update, len(trace.events)), key=lambda at: (held[at], at))
    uncertainty = max(breakdown.sized.uncertainty_bytes, held[at] // _UNCERTAINTY_SHARE)
    reserved_band = max(breakdown.sized.uncertainty_bytes, reserved_bytes // _UNCERTAINTY_SHARE) + LARGE_SEGMENT_BYTES
    differs = _first_difference([entries[at].size for at in requests], [sizes[block] for block in blocks])
    return UpdateComparison(
        parts=trace.parts,
        held=Figure(recorded[peak], held[at], uncertainty),
        reserved=Figure(max(reserved[start:]), reserved_bytes, reserved_band),
        first_difference=differs and _describe(recording, breakdown, requests[differs[0]], blocks[differs[1]]),
        differences=_compare_sources(recording, breakdown, peak, at),
    )


def _first_difference(recorded: Sequence[int], predicted: Sequence[int]) -> tuple[int, int] | None:
    """Return the places of the first requests that differ in size, recorded and predicted; None if all are equal.

    The update begins at the recorded request that is as large as the first one predicted, or with as many requests left
    as are predicted: where most of those that follow are as predicted; the latest of several.
    """
    least = max(0, len(recorded) - 2 * len(predicted))
    starts = [start for start in range(least, len(recorded)) if recorded[start] == predicted[0]]
    starts.append(max(0, len(recorded) - len(predicted)))
    equal = {start: sum(map(eq, islice(recorded, start, None), predicted)) for start in starts}
    start = max(equal, key=lambda start: (equal[start], start))
    pairs = enumerate(zip(islice(recorded, start, None), predicted, strict=False))
    return next(((start + place, place) for place, (size, other) in pairs if size != other), None)


def _no_such_update(recording: Recording, parts: tuple[int, ...], predicted: int, recorded: int) -> UsageError:
    dropped = "; older events were dropped (max_entries)" if recording.overflowed else ""
    return UsageError(
        f"the record does not end with an update in micro-batches of {format_parts(parts)}: not half of its "
        f"{predicted} predicted requests for memory are the last of {recorded} recorded ones{dropped}",
        hint="give the --micro-batch, --target-batch and further flags of that run, and dump the snapshot behind an "
        "update",
    )


def _alive(recording: Recording, end: int) -> dict[int, int]:
    """Return the bytes of each block that is alive before event `end`, by its event (negative: from before all)."""
    at = {address: ~number for number, address in enumerate(recording.before)}
    held = {number: recording.before[address] for address, number in at.items()}
    for number, entry in enumerate(recording.entries[:end]):
        if entry.action == "alloc":
            at[entry.addr] = number
            held[number] = entry.size
        elif entry.action == "free_completed":
            del held[at.pop(entry.addr)]
    return held


def _source(breakdown: MemoryBreakdown, block: int) -> Source:
    """Return the source of a predicted block; equal layers have one."""
    use = breakdown.uses[block]
    path, kind = breakdown.labelled.modules[use.module]
    return Source(use.category, mask_numbers(path) or kind, breakdown.labelled.origins[block].op)


def _describe(recording: Recording, breakdown: MemoryBreakdown, at: int, block: int) -> RequestDifference:
    entry = recording.entries[at]
    return RequestDifference(entry.size, entry.line, breakdown.sized.sizes[block], _source(breakdown, block))


def _compare_sources(
    recording: Recording, breakdown: MemoryBreakdown, end: int, at: int
) -> tuple[SourceDifference, ...]:
    """Return what is held before the recorded event `end` alone, and after the predicted event `at` alone, by source.

    Blocks of equal sizes are the same.
    """
    recorded, predicted, blocks = Counter[Source](), Counter[Source](), dict[int, list[int]]()
    for block, _ in reversed(breakdown.alive(at)):
        blocks.setdefault(breakdown.sized.sizes[block], []).append(block)
    for number, size in sorted(_alive(recording, end).items()):
        if left := blocks.get(size):
            left.pop()
        elif size >= _SMALLEST:
            recorded[Source(_NOT_PREDICTED, line=recording.entries[number].line if number >= 0 else "")] += size
    for size, left in blocks.items():
        for block in left if size >= _SMALLEST else ():
            predicted[_source(breakdown, block)] += size
    found = [SourceDifference(source, recorded[source], predicted[source]) for source in {**recorded, **predicted}]
    return tuple(sorted(found, key=lambda one: (-one.recorded_bytes - one.predicted_bytes, one.source)))
