"""Explains the memory of a schedule on a simulated card."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from autoaccum.devices.budget import Deadline
from autoaccum.devices.explanation import Change, CurvePoint, MemoryReport, Timeline
from autoaccum.devices.simulated.breakdown import MemoryBreakdown, explain_peak, holdings_at
from autoaccum.devices.simulated.simulation_requests import CHECKPOINT, LabelParts, SuggestChanges, TraceParts
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.errors import AutoaccumError, NotMeasuredError, first_line
from autoaccum.messages import Message, message
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.trace_records import LabelledTrace, Phase, Trace
from autoaccum.units import format_bytes

_EXPANDABLE_SEGMENTS = Change(
    name="expandable_segments",
    what="segments that grow in place of fixed ones (PYTORCH_ALLOC_CONF=expandable_segments:True)",
)


@dataclass(frozen=True)
class Explainer:
    """Explains schedules of one workload on one simulated card; `card` is its name in `Explanation.card`."""

    card: str
    context_bytes: int
    limit_bytes: int
    traces: TraceCache
    replayer: Replayer

    def explain(
        self,
        made: Sequence[Trace],
        deadline: Deadline,
        *,
        changes: bool = True,
        curve: bool = False,
        detail: bool = False,
    ) -> MemoryReport:
        """Explain the trace with the highest peak among `made`, the traces of a schedule.

        Args:
            made: The traces of the schedule.
            deadline: The time limit of all further traces.
            changes: Also simulate changes that would lower the peak.
            curve: Also compute the peak over the size of the micro-batch.
            detail: Also list everything held (`MemoryReport.holdings`), for a comparison.

        Raises:
            WorkloadError, UsageError, NotMeasuredError: The schedule cannot be traced again, or with `detail` takes
                other memory each time.
        """
        trace = max(made, key=self.replayer.peak_bytes)
        request = LabelParts(parts=trace.parts, **self.traces.way)
        labelled = self.traces.call(request, deadline.left_seconds)
        if detail:
            labelled = self._repeatable(trace, labelled, deadline)
        breakdown = MemoryBreakdown(labelled, self.replayer.with_sizes(labelled.trace))
        explanation = explain_peak(
            breakdown,
            card=self.card,
            peak_bytes=self.replayer.peak_bytes(labelled.trace),
            context_bytes=self.context_bytes,
        )
        timeline = make_timeline(breakdown, breakdown.sized.reserved_over_time(self.replayer.settings))
        found, notes = self._all_changes(trace, labelled, deadline) if changes else ((), ())
        return MemoryReport(
            explanation=dataclasses.replace(explanation, changes=found),
            timeline=timeline,
            curve=self._curve(max(trace.parts), deadline) if curve else (),
            notes=notes,
            holdings=holdings_at(breakdown, breakdown.peak_at) if detail else (),
        )

    def _repeatable(self, trace: Trace, labelled: LabelledTrace, deadline: Deadline) -> LabelledTrace:
        """Return the trace that repeats; the first one may differ, by what the workload keeps for later calls.

        Raises:
            NotMeasuredError: Each trace differs from the one before.
        """
        if labelled.trace == trace:
            return labelled
        request = LabelParts(parts=trace.parts, **self.traces.way)
        again = self.traces.call(request, deadline.left_seconds)
        if again.trace != labelled.trace:
            once, twice = (format_bytes(self.replayer.peak_bytes(each.trace)) for each in (labelled, again))
            took = "the same memory in other pieces" if once == twice else f"other memory ({once}, then {twice})"
            raise NotMeasuredError(
                f"the same micro-batches, traced twice, took {took}",
                hint="seed what is random, and keep nothing from call to call",
            )
        self.traces.keep(again.trace)
        return again

    def _curve(self, size: int, deadline: Deadline) -> tuple[CurvePoint, ...]:
        def trace_of(size: int) -> Trace | None:
            return None if deadline.is_over else self.traces.extrapolate(size, limit_seconds=deadline.left_seconds)

        most, limit_bytes = max(self.traces.share, size), self.limit_bytes
        with suppress(AutoaccumError):
            return curve_points(trace_of, self.replayer, size=size, most=most, limit_bytes=limit_bytes)
        return ()

    def _all_changes(
        self, trace: Trace, labelled: LabelledTrace, deadline: Deadline
    ) -> tuple[tuple[Change, ...], tuple[Message, ...]]:
        """Return each change with its saving, the largest first, and a note if some could not be simulated."""
        if labelled.trace != trace:  # The workload's own variation would look like the effect of a change.
            return (), (message("changes_vary"),)
        found: list[Change] = []
        notes: tuple[Message, ...] = ()
        if expanding := self.replayer.expanding():
            found.append(self._with_effect(_EXPANDABLE_SEGMENTS, trace, trace, expanding))
        try:
            suggestions = self.traces.call(SuggestChanges(), deadline.left_seconds)
        except AutoaccumError as error:
            suggestions, notes = (), (message("changes_unknown", error=first_line(error)),)
        recomputes = any(origin.role == "recomputed" for origin in labelled.origins)
        for change in suggestions:
            if change.name == CHECKPOINT and recomputes:
                continue  # The model is checkpointed already.
            if deadline.is_over:
                notes = (message("change_not_simulated", change=change.name),)
                break
            request = TraceParts(parts=trace.parts, change=change.name, **self.traces.way)
            try:
                changed = self.traces.call(request, deadline.left_seconds)
            except AutoaccumError as error:
                found.append(dataclasses.replace(change, message=first_line(error)))
            else:
                found.append(self._with_effect(change, trace, changed, self.replayer))
        return tuple(sorted(found, key=_saving)), notes

    def _with_effect(self, change: Change, trace: Trace, changed: Trace, replayer: Replayer) -> Change:
        peak_bytes = replayer.peak_bytes(changed)
        return dataclasses.replace(
            change,
            peak_bytes=peak_bytes,
            saved_bytes=self.replayer.peak_bytes(trace) - peak_bytes,
            min_budget_bytes=replayer.min_budget_bytes([changed], self.limit_bytes),
        )


def _saving(change: Change) -> tuple[float, float]:
    """Return a sort key: the largest saving first, then the smallest budget."""
    if change.saved_bytes is None or change.min_budget_bytes is None:
        return math.inf, math.inf
    return -change.saved_bytes, change.min_budget_bytes


_TIMELINE_POINTS = 400
_SAME_PEAK = 0.001
"""The share of the peak by which the last update may differ from it and still be drawn in its place."""
_CURVE_POINTS = 12
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
    return later if max(differ, held[peak_at] - held[later]) <= _SAME_PEAK * held[peak_at] else peak_at


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
) -> tuple[CurvePoint, ...]:
    """Return peaks from 2 samples to where the budget is crossed, or to `most`; `size` is one point.

    There are no points if `trace_of` returns None: no trace follows from those of other sizes.
    """
    low, high = trace_of(2), trace_of(max(size, 3))
    if low is None or high is None:
        return ()
    low_bytes, high_bytes = replayer.peak_bytes(low), replayer.peak_bytes(high)
    # The line through both peaks reaches the multiple of the budget there; a minimal slope bounds flat lines.
    slope = max((high_bytes - low_bytes) / (max(size, 3) - 2), high_bytes / (4 * max(size, 3)))
    last = min(most, max(size, 3) + max(1, int((_BEYOND * limit_bytes - high_bytes) / slope)))
    found = []
    for at in _sizes(size, max(last, size)):
        trace = trace_of(at)
        if trace is None:
            return ()
        found.append(CurvePoint(at, replayer.peak_bytes(trace)))
    return tuple(found)


def _sizes(size: int, last: int) -> list[int]:
    """Return even steps from 2 to `last`, with `size` among them.

    >>> _sizes(86, 112)
    [2, 12, 22, 32, 42, 52, 62, 72, 82, 86, 92, 102, 112]
    """
    even = {round(2 + (last - 2) * number / (_CURVE_POINTS - 1)) for number in range(_CURVE_POINTS)}
    return sorted(at for at in even | {size} if 2 <= at <= max(last, size))
