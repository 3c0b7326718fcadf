"""The last update of a recording beside its prediction: what is held at the peak, by module and operator."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import eq
from typing import Final

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.budget import Deadline
from autoaccum.devices.simulated.breakdown import MemoryBreakdown
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import LabelParts
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

    snapshot: str
    events: int
    card: str
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
    labelled = device.traces.ask(LabelParts, schedule.micro_batches, Deadline(None))
    breakdown = MemoryBreakdown(labelled, device.replayer_with(recording.settings))
    requests, blocks = _large_requests(recording, breakdown)
    trace, entries, start = breakdown.labelled.trace, recording.entries, requests[-len(blocks) :][0]
    changes = (_CHANGES.get(entry.action, 0) * entry.size for entry in entries)
    recorded = list(accumulate(changes, initial=sum(recording.before.values())))
    reserved = list(accumulate((entry.reserved_bytes for entry in entries), initial=recording.reserved_before))
    recorded_at = max(range(start + 1, len(recorded)), key=lambda at: (recorded[at], at))
    held = breakdown.held_bytes
    predicted_at = max(range(trace.last_update, len(trace.events)), key=lambda at: (held[at], at))

    def figure(recorded: int, predicted: int, grain_bytes: int = 0) -> Figure:
        uncertainty = max(breakdown.sized.uncertainty_bytes, predicted // _UNCERTAINTY_SHARE) + grain_bytes
        return Figure(recorded, predicted, uncertainty)

    return UpdateComparison(
        snapshot=str(snapshot),
        events=len(entries),
        card=device.name,
        parts=trace.parts,
        held=figure(recorded[recorded_at], held[predicted_at]),
        reserved=figure(max(reserved[start:]), breakdown.peak_bytes, LARGE_SEGMENT_BYTES),
        first_difference=_first_difference(recording, requests, breakdown, blocks),
        differences=_compare_sources(recording, breakdown, recorded_at, predicted_at),
    )


def _large_requests(recording: Recording, breakdown: MemoryBreakdown) -> tuple[list[int], list[int]]:
    """Return the recorded requests of at least 64 KiB, and the blocks that the last update of a trace requests.

    Raises:
        UsageError: Not half of these blocks are the last requests of the record.
    """
    trace, sizes, entries = breakdown.labelled.trace, breakdown.sized.sizes, recording.entries
    blocks = [event for event in trace.events[trace.last_update :] if event >= 0 and sizes[event] >= _SMALLEST]
    requests = [at for at, entry in enumerate(entries) if entry.action == "alloc" and entry.size >= _SMALLEST]
    last = requests[-len(blocks) :]
    common = Counter(entries[at].size for at in last) & Counter(sizes[block] for block in blocks)
    if common and 2 * common.total() >= len(blocks):
        return requests, blocks
    dropped = "; older events were dropped (max_entries)" if recording.overflowed else ""
    raise UsageError(
        f"the record does not end with an update in micro-batches of {format_parts(trace.parts)}: not half of its "
        f"{len(blocks)} predicted requests for memory are the last of {len(requests)} recorded ones{dropped}",
        hint="give the --micro-batch, --target-batch and further flags of that run, and dump the snapshot behind an "
        "update",
    )


def _first_difference(
    recording: Recording, requests: Sequence[int], breakdown: MemoryBreakdown, blocks: Sequence[int]
) -> RequestDifference | None:
    """Return the first of the recorded `requests` and the predicted `blocks` that differ in size; None: all are equal.

    The update begins at the recorded request that is as large as the first one predicted, or with as many requests left
    as are predicted: where most of those that follow are as predicted; the latest of several.
    """
    recorded = [recording.entries[at].size for at in requests]
    predicted = [breakdown.sized.sizes[block] for block in blocks]
    least = max(0, len(recorded) - 2 * len(predicted))
    starts = [start for start in range(least, len(recorded)) if recorded[start] == predicted[0]]
    starts.append(max(0, len(recorded) - len(predicted)))
    equal = {start: sum(map(eq, islice(recorded, start, None), predicted)) for start in starts}
    start = max(equal, key=lambda start: (equal[start], start))
    for at, block in zip(requests[start:], blocks, strict=False):
        entry, size = recording.entries[at], breakdown.sized.sizes[block]
        if entry.size != size:
            return RequestDifference(entry.size, entry.line, size, _source(breakdown, block))
    return None


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


def _compare_sources(
    recording: Recording, breakdown: MemoryBreakdown, end: int, at: int
) -> tuple[SourceDifference, ...]:
    """Return what is held before the recorded event `end` alone, and after the predicted event `at` alone, by source.

    Blocks of equal sizes are the same.
    """
    recorded, predicted = Counter[Source](), Counter[Source]()
    blocks: dict[int, list[int]] = {}
    for block in reversed(breakdown.alive(at)):
        blocks.setdefault(breakdown.sized.sizes[block], []).append(block)
    for number, size in sorted(_alive(recording, end).items()):
        if alike := blocks.get(size):
            alike.pop()
        elif size >= _SMALLEST:
            recorded[Source(_NOT_PREDICTED, line=recording.entries[number].line if number >= 0 else "")] += size
    for size, left in blocks.items():
        for block in left if size >= _SMALLEST else ():
            predicted[_source(breakdown, block)] += size
    differences = [SourceDifference(source, recorded[source], predicted[source]) for source in recorded | predicted]
    return tuple(sorted(differences, key=lambda row: (-row.recorded_bytes - row.predicted_bytes, row.source)))
