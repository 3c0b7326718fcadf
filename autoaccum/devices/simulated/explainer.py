"""Explains the memory of a schedule on a simulated card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from autoaccum.devices.budget import Deadline
from autoaccum.devices.explanation import Change, CurvePoint, MemoryReport, Timeline
from autoaccum.devices.simulated.breakdown import MemoryBreakdown
from autoaccum.devices.simulated.simulation_requests import CHECKPOINT, LabelParts, SuggestChanges, TraceParts
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.errors import AutoaccumError, NotMeasuredError, first_line
from autoaccum.messages import Message, message
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.trace_records import LabelledTrace, Phase, Trace
from autoaccum.units import format_bytes

_EXPANDABLE_SEGMENTS = Change(
    name="expandable_segments",
    what="segments that grow in place of fixed ones (PYTORCH_ALLOC_CONF=expandable_segments:True)",
)
_TIMELINE_POINTS = 400
_SAME_PEAK = 0.001
"""The share of the peak by which the last update may differ from it and still be drawn in its place."""
_CURVE_POINTS = 12
_BEYOND = 1.2
"""The multiple of the budget to which the curve extends, so that it is seen to cross the budget."""


@dataclass(frozen=True)
class Explainer:
    """Explains schedules of a workload on a simulated card.

    Attributes:
        traces: The traces of the workload.
        replayer: Replays them as the card's allocator.
        replayer_with: Returns a replayer of the card under other settings of the allocator.
        card: The name of the card.
        limit_bytes: The budget.
        context_bytes: What the process holds outside of the allocator.
        deadline: The time limit of all further traces.
    """

    traces: TraceCache
    replayer: Replayer
    replayer_with: Callable[[AllocatorSettings], Replayer]
    card: str
    limit_bytes: int
    context_bytes: int
    deadline: Deadline

    def explain(
        self, parts: tuple[int, ...], *, changes: bool = True, curve: bool = False, repeatable: bool = False
    ) -> MemoryReport:
        """Explain the trace with the highest peak among those of `parts`.

        Args:
            parts: The schedule.
            changes: Also simulate changes that would lower the peak.
            curve: Also compute the peak over the size of the micro-batch.
            repeatable: Refuse a schedule that takes other memory each time it is traced.

        Raises:
            WorkloadError, NotMeasuredError: The schedule cannot be traced again, or not repeatably.
        """
        trace = max(self.traces.traces_of(parts, self.deadline, fresh=True), key=self.replayer.peak_bytes)
        labelled = self.traces.ask(LabelParts, trace.parts, self.deadline)
        if repeatable and labelled.trace != trace:
            labelled = self._repeat(labelled)
        breakdown = MemoryBreakdown(labelled, self.replayer)
        effects, notes = self._changes(trace, labelled) if changes else ((), ())
        return MemoryReport(
            explanation=breakdown.explain_peak(card=self.card, context_bytes=self.context_bytes, changes=effects),
            timeline=make_timeline(breakdown),
            curve=self._curve(max(trace.parts)) if curve else (),
            notes=notes,
            holdings=breakdown.holdings(breakdown.peak_at),
            lines=labelled.lines,
        )

    def _repeat(self, first: LabelledTrace) -> LabelledTrace:
        """Trace once more: the very first trace may differ, by what the workload keeps for later calls.

        Raises:
            NotMeasuredError: Each trace differs from the one before.
        """
        second = self.traces.ask(LabelParts, first.trace.parts, self.deadline)
        if second.trace != first.trace:
            once, twice = (format_bytes(self.replayer.peak_bytes(labelled.trace)) for labelled in (first, second))
            took = "the same memory in other pieces" if once == twice else f"other memory ({once}, then {twice})"
            raise NotMeasuredError(
                f"the same micro-batches, traced twice, took {took}",
                hint="seed what is random, and keep nothing from call to call",
            )
        self.traces.keep(second.trace)
        return second

    def _curve(self, size: int) -> tuple[CurvePoint, ...]:
        """Return no points if the traces of other sizes do not follow from small ones."""

        def peak_bytes(size: int) -> int:
            trace = self.traces.extrapolate((size,), self.deadline)
            if trace is None:
                raise NotMeasuredError(f"the trace of {size} samples cannot be extrapolated")
            return self.replayer.peak_bytes(trace)

        with suppress(AutoaccumError):
            return curve_points(
                peak_bytes, size=size, most=max(self.traces.rank_samples, size), limit_bytes=self.limit_bytes
            )
        return ()

    def _changes(self, trace: Trace, labelled: LabelledTrace) -> tuple[tuple[Change, ...], tuple[Message, ...]]:
        """Return each change with its effect, the largest saving first, and a note if some could not be simulated."""
        if labelled.trace != trace:  # The workload's own variation would look like the effect of a change.
            return (), (message("changes_unknown", error="two traces of the same micro-batches took other memory"),)
        effects: list[Change] = []
        notes: tuple[Message, ...] = ()
        if expanding := self.replayer.expanding():
            effects.append(self._effect(_EXPANDABLE_SEGMENTS, trace, trace, expanding))
        try:
            suggestions = self.traces.call(SuggestChanges(), self.deadline)
        except AutoaccumError as error:
            suggestions, notes = (), (message("changes_unknown", error=first_line(error)),)
        is_checkpointed = any(origin.role == "recomputed" for origin in labelled.origins)
        for change in suggestions:
            if change.name == CHECKPOINT and is_checkpointed:
                continue
            if self.deadline.is_over:
                notes = (message("change_not_simulated", change=change.name),)
                break
            try:
                changed = self.traces.ask(TraceParts, trace.parts, self.deadline, change=change.name)
                effects.append(self._effect(change, trace, changed, self.replayer))
            except AutoaccumError as error:
                effects.append(dataclasses.replace(change, message=first_line(error)))
        return tuple(sorted(effects, key=_by_saving)), notes

    def _effect(self, change: Change, trace: Trace, changed: Trace, replayer: Replayer) -> Change:
        peak_bytes = replayer.peak_bytes(changed)
        return dataclasses.replace(
            change,
            peak_bytes=peak_bytes,
            saved_bytes=self.replayer.peak_bytes(trace) - peak_bytes,
            min_budget_bytes=replayer.min_budget_bytes([changed], self.limit_bytes),
        )


def _by_saving(change: Change) -> tuple[bool, int, int]:
    """Return a sort key: the largest saving first, then the smallest budget; what was not simulated comes last."""
    return change.saved_bytes is None, -(change.saved_bytes or 0), change.min_budget_bytes or 0


def make_timeline(breakdown: MemoryBreakdown, points: int = _TIMELINE_POINTS) -> Timeline:
    """Return the last update as at most `points` ranges of equally many events, each at its highest event.

    The whole trace is drawn if the peak lies before the last update (in the first update or an evaluation) and the
    last update has no peak like it.
    """
    trace, held = breakdown.labelled.trace, breakdown.held_bytes
    reserved_bytes = breakdown.sized.reserved_over_time(breakdown.replayer.settings)
    peak_at = _shown_peak(breakdown)
    start = trace.last_update if peak_at >= trace.last_update else 0
    length = -(-(len(held) - start) // points)
    ranges = [range(first, min(first + length, len(held))) for first in range(start, len(held), length)]
    highest = [max(reversed(events), key=held.__getitem__) for events in ranges]
    return Timeline(
        categories={category: tuple(total[at] for at in highest) for category, total in breakdown.totals.items()},
        reserved_bytes=tuple(reserved_bytes[at] for at in highest),
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
    by_range: dict[int, Phase] = {0: later[0][1]} if later else {}
    by_range.update((index // length, phase) for index, phase in later)
    return tuple(next(run) for _, run in groupby(by_range.items(), key=itemgetter(1)))


def curve_points(peak_bytes: Callable[[int], int], *, size: int, most: int, limit_bytes: int) -> tuple[CurvePoint, ...]:
    """Return the peaks of 2 samples to where the budget is crossed, or to `most`; `size` is one point."""
    end = max(size, 3)
    low_bytes, high_bytes = peak_bytes(2), peak_bytes(end)
    # The line through both peaks reaches the multiple of the budget there; a minimal slope bounds flat lines.
    slope = max((high_bytes - low_bytes) / (end - 2), high_bytes / (4 * end))
    last = min(most, end + max(1, int((_BEYOND * limit_bytes - high_bytes) / slope)))
    return tuple(CurvePoint(at, peak_bytes(at)) for at in _sizes(size, max(last, size)))


def _sizes(size: int, last: int) -> list[int]:
    """Return even steps from 2 to `last`, with `size` among them.

    >>> _sizes(86, 112)
    [2, 12, 22, 32, 42, 52, 62, 72, 82, 86, 92, 102, 112]
    """
    even = {round(2 + (last - 2) * number / (_CURVE_POINTS - 1)) for number in range(_CURVE_POINTS)}
    return sorted(at for at in even | {size} if 2 <= at <= max(last, size))
