"""Curves of memory: over the events of an update, and over the size of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import CurvePoint, Timeline
from autoaccum.devices.simulated.allocator.replayer import Replayer
from autoaccum.devices.simulated.explain.breakdown import MemoryBreakdown
from autoaccum.devices.simulated.trace_records import Trace

_TIMELINE_POINTS = 400
_TOLERANCE = 0.001
"""The share of the peak by which the last update may differ from it and still be drawn in its place."""
_CURVE_POINTS = 12
_EVENTS_FOR_LEAST = 120_000
_BEYOND = 1.2
"""The multiple of the budget to which the curve extends, so that it is seen to cross the budget."""


def make_timeline(
    breakdown: MemoryBreakdown, reserved_bytes: Sequence[int], points: int = _TIMELINE_POINTS
) -> Timeline:
    """Return the last update as at most `points` ranges of equally many events, each at its highest event.

    The whole trace is drawn if the peak lies before the last update (in the first update or an evaluation) and the
    last update has no peak like it.
    """
    trace, held = breakdown.labelled.trace, breakdown.held_bytes
    peak_at = _shown_peak(breakdown)
    start = trace.last_update if peak_at >= trace.last_update else 0
    length = -(-(len(held) - start) // points)
    ranges = [range(first, min(first + length, len(held))) for first in range(start, len(held), length)]
    chosen = [max(reversed(each), key=held.__getitem__) for each in ranges]
    return Timeline(
        categories={category: tuple(total[at] for at in chosen) for category, total in breakdown.totals.items()},
        reserved_bytes=tuple(reserved_bytes[at] for at in chosen),
        phases=_phases(trace.phases, start, length),
        peak_at=(peak_at - start) // length,
    )


def _shown_peak(breakdown: MemoryBreakdown) -> int:
    """Return the highest event of the last update if it equals the peak in every category; otherwise the peak."""
    held, last, peak_at = breakdown.held_bytes, breakdown.labelled.trace.last_update, breakdown.peak_at
    if peak_at >= last:
        return peak_at
    later = max(reversed(range(last, len(held))), key=held.__getitem__)
    differ = max(abs(total[later] - total[peak_at]) for total in breakdown.totals.values())
    return later if max(differ, held[peak_at] - held[later]) <= _TOLERANCE * held[peak_at] else peak_at


def _phases(phases: Sequence[tuple[int, Phase]], start: int, length: int) -> tuple[tuple[int, Phase], ...]:
    """Return the phases by range; if several begin in one range, the last. The first phase begins at 0."""
    later = [(index - start, phase) for index, phase in phases if index >= start]
    found: dict[int, Phase] = {0: later[0][1]} if later else {}
    for index, phase in later:
        found[index // length] = phase
    return tuple(next(run) for _, run in groupby(found.items(), key=itemgetter(1)))


def curve_points(
    trace_of: Callable[[int], Trace | None],
    replayer: Replayer,
    *,
    size: int,
    most: int,
    limit_bytes: int,
    events_for_least: int = _EVENTS_FOR_LEAST,
) -> tuple[CurvePoint, ...]:
    """Return peaks and least budgets from 2 samples to where the budget is crossed, or to `most`; `size` is one point.

    There are no points if `trace_of` returns None: no trace follows from those of other sizes. Each least budget takes
    several replays; none is computed if the traces of all points have more than `events_for_least` events.
    """
    low, high = trace_of(2), trace_of(max(size, 3))
    if low is None or high is None:
        return ()
    low_bytes, high_bytes = replayer.peak_bytes(low), replayer.peak_bytes(high)
    # The line through both peaks reaches the multiple of the budget there; a minimal slope bounds flat lines.
    slope = max((high_bytes - low_bytes) / (max(size, 3) - 2), high_bytes / (4 * max(size, 3)))
    last = min(most, max(size, 3) + max(1, int((_BEYOND * limit_bytes - high_bytes) / slope)))
    cheap = _CURVE_POINTS * len(low.events) <= events_for_least
    found = []
    for at in _sizes(size, max(last, size)):
        trace = trace_of(at)
        if trace is None:
            return ()
        peak_bytes = replayer.peak_bytes(trace)
        found.append(CurvePoint(at, peak_bytes, replayer.least_bytes([trace], peak_bytes) if cheap else None))
    return tuple(found)


def _sizes(size: int, last: int) -> list[int]:
    """Return even steps from 2 to `last`, with `size` among them.

    >>> _sizes(86, 112)
    [2, 12, 22, 32, 42, 52, 62, 72, 82, 86, 92, 102, 112]
    """
    even = {round(2 + (last - 2) * number / (_CURVE_POINTS - 1)) for number in range(_CURVE_POINTS)}
    return sorted(at for at in even | {size} if 2 <= at <= max(last, size))
