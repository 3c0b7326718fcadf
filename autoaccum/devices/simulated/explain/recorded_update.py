"""The last update of a recording beside its prediction: what is held at the peak, by operator, module and line."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.simulated.allocator.caching_allocator import LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES
from autoaccum.devices.simulated.allocator.recording import Recording
from autoaccum.devices.simulated.explain.breakdown import MemoryBreakdown
from autoaccum.errors import UsageError

_BAND_SHARE: Final = 100
"""The hundredth of a peak by which it may be off, beside the workspaces that were not measured."""

NOT_PREDICTED: Final = "not predicted"


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
        recorded_requests, predicted_requests: Requests for memory.
        first_difference: The first request of more than 512 bytes that differs: loops differ in scalars.
        differences: The sources that hold more or less at the peak; the largest difference comes first.
    """

    parts: tuple[int, ...]
    before: Figure
    held: Figure
    reserved: Figure
    recorded_requests: int
    predicted_requests: int
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
    trace, sizes = breakdown.labelled.trace, breakdown.sized.sizes
    blocks = [event for event in trace.events[trace.last_update :] if event >= 0 and sizes[event] > 0]
    requests = [number for number, entry in enumerate(recording.entries) if entry.action == "alloc"]
    pairs = align_ends([recording.entries[number].size for number in requests], [sizes[block] for block in blocks])
    equal = sum(None not in pair for pair in pairs or ())
    if pairs is None or 2 * equal < len(blocks):
        raise _no_such_update(recording, trace.parts, len(blocks), len(requests))
    names = _Sources(breakdown)
    paired = [
        (None if one is None else requests[one], None if other is None else blocks[other], alike)
        for one, other, alike in pair_runs(pairs)
    ]
    made = {one: names.of(other) for one, other, _ in paired if one is not None and other is not None}
    differ = ((one, other) for one, other, alike in paired if not alike)
    found = (names.describe(recording, one, other) for one, other in differ)
    first = next(
        (each for each in found if max(each.recorded_bytes or 0, each.predicted_bytes or 0) > MIN_BLOCK_BYTES), None
    )
    recorded = _follow(recording, next(one for one, _, _ in paired if one is not None))
    at = max(range(trace.last_update, len(trace.events)), key=lambda at: (breakdown.held_bytes[at], at))
    differences = _compare_sources(
        names.count_recorded(recording, recorded, made),
        names.count_predicted(block for block, _ in breakdown.alive(at)),
    )
    before, held = breakdown.held_bytes[max(trace.last_update - 1, 0)], breakdown.held_bytes[at]
    band = max(breakdown.sized.band_bytes, held // _BAND_SHARE)
    reserved_band = max(breakdown.sized.band_bytes, reserved_bytes // _BAND_SHARE) + LARGE_SEGMENT_BYTES
    return UpdateComparison(
        parts=trace.parts,
        before=Figure(sum(recorded.before.values()), before, band),
        held=Figure(sum(recorded.at_peak.values()), held, band),
        reserved=Figure(recorded.reserved_bytes, reserved_bytes, reserved_band),
        recorded_requests=sum(one is not None for one, _ in pairs),
        predicted_requests=len(blocks),
        first_difference=first,
        differences=differences,
    )


def _no_such_update(recording: Recording, parts: tuple[int, ...], predicted: int, recorded: int) -> UsageError:
    dropped = "; older events were dropped (max_entries)" if recording.overflowed else ""
    return UsageError(
        f"the record does not end with an update in micro-batches of {format_parts(parts)}: not half of its "
        f"{predicted} predicted requests for memory are the last of {recorded} recorded ones{dropped}",
        hint="give the --micro-batch, --target-batch and further flags of that run, and dump the snapshot behind an "
        "update",
    )


@dataclass(frozen=True)
class _RecordedUpdate:
    """What blocks hold before an update and at its peak, by the number of their event (negative: from before all)."""

    before: Mapping[int, int]
    at_peak: Mapping[int, int]
    reserved_bytes: int


def _follow(recording: Recording, start: int) -> _RecordedUpdate:
    """Follow a recording to the peak of the update that begins with event `start`."""
    held_bytes = most = 0
    peak_at = start
    reserved = most_reserved = recording.reserved_before
    for number, entry in enumerate(recording.entries):
        change = {"alloc": entry.size, "free_completed": -entry.size}.get(entry.action, 0)
        held_bytes += change
        reserved += entry.reserved_bytes
        if number >= start:
            most_reserved = max(most_reserved, reserved)
            if change > 0 and held_bytes >= most or number == start:
                most, peak_at = held_bytes, number
        else:
            most_reserved = reserved
    return _RecordedUpdate(_alive(recording, start), _alive(recording, peak_at + 1), most_reserved)


def _alive(recording: Recording, end: int) -> dict[int, int]:
    """Return the bytes of each block that is alive before event `end`, by the number of its event."""
    at = {address: ~number for number, address in enumerate(recording.before.used)}
    held = {number: recording.before.used[address] for address, number in at.items()}
    for number, entry in enumerate(recording.entries[:end]):
        if entry.action == "alloc":
            at[entry.addr] = number
            held[number] = entry.size
        elif entry.action == "free_completed":
            del held[at.pop(entry.addr)]
    return held


class _Sources:
    """The sources of predicted blocks, and of the recorded ones that correspond to them."""

    def __init__(self, breakdown: MemoryBreakdown) -> None:
        self._breakdown = breakdown

    def of(self, block: int) -> Source:
        """Return the source of a predicted block."""
        labelled, use = self._breakdown.labelled, self._breakdown.uses[block]
        origin = labelled.origins[block]
        stack = labelled.stacks[origin.stack]
        path, kind = labelled.modules[use.module]
        line = f"{stack[0].filename}:{stack[0].line}" if stack else ""
        return Source(use.category, path or kind, origin.op, line)

    def count_predicted(self, blocks: Iterable[int]) -> Counter[Source]:
        """Return the bytes of predicted blocks by source."""
        found: Counter[Source] = Counter()
        for block in blocks:
            found[self.of(block)] += self._breakdown.sized.sizes[block]
        return found

    def count_recorded(
        self, recording: Recording, recorded: _RecordedUpdate, made: Mapping[int, Source]
    ) -> Counter[Source]:
        """Return the bytes at the peak of a recorded update by source; `made` are the sources of requests in it.

        Blocks from before the update have that of a predicted one of their size, in the order of their allocation.
        """
        last_update = self._breakdown.labelled.trace.last_update
        sizes = self._breakdown.sized.sizes
        left: dict[int, deque[int]] = {}
        for block, use in enumerate(self._breakdown.uses):
            if use.allocated_at < last_update <= use.freed_at:
                left.setdefault(sizes[block], deque()).append(block)
        known = dict(made)
        for number, size in sorted(recorded.before.items()):
            if left.get(size):
                known[number] = self.of(left[size].popleft())
        found: Counter[Source] = Counter()
        for number, size in recorded.at_peak.items():
            line = recording.entries[number].line if number >= 0 else ""
            found[known.get(number) or Source(NOT_PREDICTED, "", "", line)] += size
        return found

    def describe(self, recording: Recording, one: int | None, other: int | None) -> RequestDifference:
        """Return the difference of one recorded and one predicted request."""
        entry = None if one is None else recording.entries[one]
        return RequestDifference(
            recorded_bytes=None if entry is None else entry.size,
            recorded_line="" if entry is None else entry.line,
            predicted_bytes=None if other is None else self._breakdown.sized.sizes[other],
            source=None if other is None else self.of(other),
        )


def _compare_sources(recorded: Counter[Source], predicted: Counter[Source]) -> tuple[SourceDifference, ...]:
    found = [SourceDifference(source, recorded[source], predicted[source]) for source in {**recorded, **predicted}]
    differ = (one for one in found if one.recorded_bytes != one.predicted_bytes)
    return tuple(sorted(differ, key=lambda one: (-abs(one.recorded_bytes - one.predicted_bytes), one.source)))


_MOST_EDITS: Final = 2000


def align_ends(
    recorded: Sequence[int], predicted: Sequence[int], most: int = _MOST_EDITS
) -> list[tuple[int | None, int | None]] | None:
    """Match all of `predicted` with the end of `recorded` by the fewest additions and omissions; None beyond `most`.

    The algorithm is that of E. Myers, "An O(ND) difference algorithm and its variations" (1986), from the ends on; what
    is recorded before the update costs nothing.

    Returns:
        Pairs of indices in order; None stands for no counterpart.

    >>> align_ends([7, 7, 1, 2, 9, 3], [1, 2, 3])
    [(2, 0), (3, 1), (4, None), (5, 2)]
    >>> align_ends([1, 7, 7, 2], [1, 7, 2])
    [(0, 0), (1, 1), (2, None), (3, 2)]
    """
    left, above = predicted[::-1], recorded[::-1]
    history: list[dict[int, int]] = [{1: 0}]
    for edits in range(most + 1):
        reached: dict[int, int] = {}
        for diagonal in range(-edits, edits + 1, 2):
            x = _step(history[-1], diagonal, len(above))
            if x is None:
                continue
            while x < len(left) and x - diagonal < len(above) and left[x] == above[x - diagonal]:
                x += 1
            reached[diagonal] = x
            if x == len(left):
                pairs: list[tuple[int | None, int | None]] = [
                    (None if y is None else len(above) - 1 - y, None if x is None else len(left) - 1 - x)
                    for y, x in _trace_back(history, x, diagonal, len(above))
                ]
                _match_early(pairs, (recorded, predicted))
                return pairs
        history.append(reached)
    return None


def _step(reached: Mapping[int, int], diagonal: int, most: int) -> int | None:
    """Return the farthest x on a diagonal by one more edit; None if there is none with y up to `most`."""
    found = (reached.get(diagonal + 1), None if (x := reached.get(diagonal - 1)) is None else x + 1)
    return max((x for x in found if x is not None and x - diagonal <= most), default=None)


def _trace_back(
    history: Sequence[Mapping[int, int]], x: int, diagonal: int, most: int
) -> list[tuple[int | None, int | None]]:
    """Return the pairs (y, x) of a path to its beginning."""
    pairs: list[tuple[int | None, int | None]] = []
    for edits in range(len(history) - 1, -1, -1):
        start = _step(history[edits], diagonal, most)
        assert start is not None
        pairs += [(at - diagonal, at) for at in range(x - 1, start - 1, -1)]
        if history[edits].get(diagonal + 1) == start:
            x, diagonal = start, diagonal + 1
            pairs.append((x - diagonal, None))
        else:
            x, diagonal = start - 1, diagonal - 1
            pairs.append((None, x))
    return pairs[:-1]  # The last one leads to the beginning.


def _match_early(pairs: list[tuple[int | None, int | None]], sizes: tuple[Sequence[int], Sequence[int]]) -> None:
    """Match the first of equal requests, so that those without one come late: a copy follows what it copies."""
    for start in range(len(pairs)):
        side = 1 if pairs[start][0] is None else 0
        end = start
        while end < len(pairs) and pairs[end][1 - side] is None:
            end += 1
        if end == start or end == len(pairs):
            continue
        run = [pair[side] for pair in pairs[start : end + 1]]
        first, last = run[0], run[-1]
        if first is None or last is None or sizes[side][first] != sizes[side][last]:
            continue
        counterpart = pairs[end][1 - side]
        made = [(counterpart, first), *((None, one) for one in run[1:])]
        pairs[start : end + 1] = made if side else [(one, other) for other, one in made]


def pair_runs(pairs: Iterable[tuple[int | None, int | None]]) -> Iterator[tuple[int | None, int | None, bool]]:
    """Yield pairs and whether they are alike: as many requests as are missing stand in for these, in order."""
    for alike, run in groupby(pairs, key=lambda pair: None not in pair):
        if alike:
            yield from ((one, other, True) for one, other in run)
            continue
        members = list(run)
        ones = [one for one, _ in members if one is not None]
        others = [other for _, other in members if other is not None]
        if len(ones) == len(others):
            members = list(zip(ones, others, strict=True))
        yield from ((one, other, False) for one, other in members)
