"""The last update of a recording beside its prediction: what is held at the peak, by operator, module and line."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.simulated.allocator.caching_allocator import LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES
from autoaccum.devices.simulated.allocator.recording import Recording
from autoaccum.devices.simulated.explain.breakdown import MemoryBreakdown
from autoaccum.errors import UsageError

_BAND_SHARE: Final = 100
"""The hundredth of a peak by which it may be off, beside the workspaces that were not measured."""

_NOT_PREDICTED: Final = "not predicted"
_RUN: Final = 4
"""So many requests in a row have to agree behind some that differ."""
_SKIPS: Final = sorted(((more, missing) for more in range(25) for missing in range(25)), key=sum)[1:]
_CHANGES: Final = {"alloc": 1, "free_completed": -1}


@dataclass(frozen=True, order=True)
class Source:
    """What holds memory: its purpose, and of its allocation the module, the operator and the line, where known."""

    category: str
    module: str
    op: str
    line: str


@dataclass(frozen=True)
class SourceDifference:
    """What one source holds at the peaks of a recorded update and of the predicted one."""

    source: Source
    recorded_bytes: int
    predicted_bytes: int


@dataclass(frozen=True, kw_only=True)
class RequestDifference:
    """A recorded request for memory and the predicted one in its place; None stands for none."""

    recorded_bytes: int | None
    recorded_line: str
    predicted_bytes: int | None
    source: Source | None


@dataclass(frozen=True)
class Figure:
    """One figure of a recorded update, and of the predicted one; `band` is by how much it may differ."""

    recorded: int
    predicted: int
    band: int

    @property
    def agrees(self) -> bool:
        """Return whether the two differ by no more than the band."""
        return abs(self.recorded - self.predicted) <= self.band


@dataclass(frozen=True, kw_only=True)
class UpdateComparison:
    """A recorded update and its prediction.

    Attributes:
        parts: The micro-batches of the update, in samples.
        before: The bytes held before it.
        held: The most bytes held in it.
        reserved: The most bytes reserved in it.
        first_difference: The first request that differs.
        differences: The sources that hold more or less at the peak; the largest difference comes first.

    Requests of at most 512 bytes count in the figures only: loops differ in scalars.
    """

    parts: tuple[int, ...]
    before: Figure
    held: Figure
    reserved: Figure
    first_difference: RequestDifference | None
    differences: tuple[SourceDifference, ...]

    @property
    def agrees(self) -> bool:
        """Return whether both peaks agree."""
        return self.held.agrees and self.reserved.agrees


def compare_update(recording: Recording, breakdown: MemoryBreakdown, reserved_bytes: int) -> UpdateComparison:
    """Lay the end of a recording beside the last update of a labelled trace, whose reserved peak is `reserved_bytes`.

    Raises:
        UsageError: The record does not end with such an update.
    """
    trace, sizes, entries = breakdown.labelled.trace, breakdown.sized.sizes, recording.entries
    blocks = [event for event in trace.events[trace.last_update :] if event >= 0 and sizes[event] > MIN_BLOCK_BYTES]
    requests = [at for at, entry in enumerate(entries) if entry.action == "alloc" and entry.size > MIN_BLOCK_BYTES]
    pairs = [
        (None if one is None else requests[one], None if other is None else blocks[other])
        for one, other in align_ends([entries[at].size for at in requests], [sizes[block] for block in blocks])
    ]
    matched = {one: other for one, other in pairs if one is not None and other is not None}
    equal = {one for one, other in matched.items() if entries[one].size == sizes[other]}
    if not equal or 2 * len(equal) < len(blocks):
        raise _no_such_update(recording, trace.parts, len(blocks), len(requests))
    first = next((pair for pair in pairs if pair[0] not in equal), None)
    start = next(one for one, _ in pairs if one is not None)
    changes = (_CHANGES.get(entry.action, 0) * entry.size for entry in entries)
    recorded = list(accumulate(changes, initial=sum(recording.before.used.values())))
    reserved = accumulate((entry.reserved_bytes for entry in entries), initial=recording.reserved_before)
    peak = max(range(start + 1, len(recorded)), key=lambda at: (recorded[at], at))
    held, ahead = breakdown.held_bytes, max(trace.last_update - 1, 0)
    at = max(range(trace.last_update, len(trace.events)), key=lambda at: (held[at], at))
    matched |= _match_sizes(_alive(recording, start), [block for block, _ in breakdown.alive(ahead)], sizes)
    band = max(breakdown.sized.band_bytes, held[at] // _BAND_SHARE)
    reserved_band = max(breakdown.sized.band_bytes, reserved_bytes // _BAND_SHARE) + LARGE_SEGMENT_BYTES
    return UpdateComparison(
        parts=trace.parts,
        before=Figure(recorded[start], held[ahead], band),
        held=Figure(recorded[peak], held[at], band),
        reserved=Figure(max(list(reserved)[start:]), reserved_bytes, reserved_band),
        first_difference=None if first is None else _describe(recording, breakdown, *first),
        differences=_compare_sources(recording, breakdown, _alive(recording, peak), at, matched),
    )


def align_ends(recorded: Sequence[int], predicted: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """Match `predicted` with the end of `recorded`, from the end on: what is before the update has no part.

    Where two requests differ, the fewest are left out behind which a few agree again. As many requests as are missing
    stand in for these, in order.

    Returns:
        Pairs of indices in order; None stands for no counterpart.

    >>> align_ends([7, 7, 1, 2, 9, 3], [1, 2, 3])
    [(2, 0), (3, 1), (4, None), (5, 2)]
    >>> align_ends([7, 1, 5, 3], [1, 2, 3])
    [(1, 0), (2, 1), (3, 2)]
    """
    pairs: list[tuple[int | None, int | None]] = []
    left, right = len(recorded), len(predicted)
    while left > 0 and right > 0:
        more, missing = (0, 0) if recorded[left - 1] == predicted[right - 1] else (1, 1)
        for skip, drop in _SKIPS if more else ():
            run = predicted[max(0, right - drop - _RUN) : right - drop] if drop < right else ()
            if run and recorded[max(0, left - skip - len(run)) : max(0, left - skip)] == run:
                more, missing = skip, drop
                break
        if more == missing:
            pairs += [(left - 1 - at, right - 1 - at) for at in range(more or 1)]
            more = missing = more or 1
        else:
            pairs += [(None, right - 1 - at) for at in range(missing)]
            pairs += [(left - 1 - at, None) for at in range(more)]
        left, right = left - more, right - missing
    return [*((None, other) for other in range(right)), *pairs[::-1]]


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
    at = {address: ~number for number, address in enumerate(recording.before.used)}
    held = {number: recording.before.used[address] for address, number in at.items()}
    for number, entry in enumerate(recording.entries[:end]):
        if entry.action == "alloc":
            at[entry.addr] = number
            held[number] = entry.size
        elif entry.action == "free_completed":
            del held[at.pop(entry.addr)]
    return held


def _match_sizes(recorded: Mapping[int, int], predicted: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """Match recorded blocks with predicted ones of their size, both in the order of their allocation."""
    left: dict[int, deque[int]] = {}
    for block in predicted:
        left.setdefault(sizes[block], deque()).append(block)
    return {number: left[size].popleft() for number, size in sorted(recorded.items()) if left.get(size)}


def _source(breakdown: MemoryBreakdown, block: int) -> Source:
    labelled, use = breakdown.labelled, breakdown.uses[block]
    origin = labelled.origins[block]
    stack = labelled.stacks[origin.stack]
    path, kind = labelled.modules[use.module]
    return Source(use.category, path or kind, origin.op, f"{stack[0].filename}:{stack[0].line}" if stack else "")


def _describe(
    recording: Recording, breakdown: MemoryBreakdown, one: int | None, other: int | None
) -> RequestDifference:
    entry = None if one is None else recording.entries[one]
    return RequestDifference(
        recorded_bytes=None if entry is None else entry.size,
        recorded_line="" if entry is None else entry.line,
        predicted_bytes=None if other is None else breakdown.sized.sizes[other],
        source=None if other is None else _source(breakdown, other),
    )


def _compare_sources(
    recording: Recording, breakdown: MemoryBreakdown, held: Mapping[int, int], at: int, matched: Mapping[int, int]
) -> tuple[SourceDifference, ...]:
    """Return what differs between the recorded blocks in `held` and the predicted ones after event `at`, by source.

    A recorded block has the source of the predicted one in `matched`.
    """
    recorded, predicted = Counter[Source](), Counter[Source]()
    for number, size in held.items():
        if size <= MIN_BLOCK_BYTES:
            continue
        line = recording.entries[number].line if number >= 0 else ""
        source = Source(_NOT_PREDICTED, "", "", line)
        recorded[_source(breakdown, matched[number]) if number in matched else source] += size
    for block, _ in breakdown.alive(at):
        if (size := breakdown.sized.sizes[block]) > MIN_BLOCK_BYTES:
            predicted[_source(breakdown, block)] += size
    found = [SourceDifference(source, recorded[source], predicted[source]) for source in {**recorded, **predicted}]
    differ = (one for one in found if one.recorded_bytes != one.predicted_bytes)
    return tuple(sorted(differ, key=lambda one: (-abs(one.recorded_bytes - one.predicted_bytes), one.source)))
