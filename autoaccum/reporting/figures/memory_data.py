"""What a plan's figure and its page draw alike: title, remark, trials, phases, and how far axes reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoaccum.devices.base import Trial
from autoaccum.devices.explanation import CATEGORIES, Category, CurvePoint, MemoryReport, Timeline
from autoaccum.planning.plan_record import Plan

_FURTHEST = 1.6
"""Sizes beyond this multiple of the largest that fits are not drawn."""

LEAST_SHARE = 0.002
"""Categories with a smaller share of the peak are not in the legend."""

_FAR = 3.0
_PART_OF_NEXT = {"batch": "forward", "clip": "update"}
"""Phases too short to be seen: copying a part to the card, and the norm."""

_PREPARATION = ("start", "load", "model", "optimizer")


def is_far(limit_bytes: int, most_bytes: int) -> bool:
    """Return whether a limit is so far above all else that it is only named, since it would flatten the rest."""
    return bool(most_bytes) and limit_bytes > _FAR * most_bytes


def plan_title(plan: Plan) -> str:
    """Return the model, the device and the sizes in one line."""
    model = str(plan.workload.get("model") or plan.workload.get("name") or "Memory")
    sizes = f"{plan.micro_batch} of {plan.target_batch} samples at a time"
    if plan.iter_size == 1 and plan.world_size == 1:
        sizes = "1 sample" if plan.micro_batch == 1 else f"{plan.micro_batch} samples at once"
    return f"{model} on {plan.device.get('name', 'this device')}, {sizes}"


def peak_remark(plan: Plan, report: MemoryReport) -> str:
    """Say where most is held."""
    explanation = report.explanation
    known = "" if plan.kind == "predicted" else "simulated: "
    where = f" of {explanation.module}" if explanation.module else ""
    return f"{known}most is held in {explanation.phase}, at {explanation.op}{where}"


def tried_sizes(plan: Plan) -> dict[int, Trial]:
    """Return the last trial of each size within the plan's own budget that is to be drawn, ascending."""
    known = [one for one in plan.trials if one.outcome != "error" and one.limit_bytes in (None, plan.limit_bytes)]
    last = sorted({trial.micro_batch: trial for trial in known}.items())
    return {size: trial for size, trial in last if size <= _FURTHEST * plan.largest_fit + 1}


def peaks_by_size(plan: Plan, curve: Sequence[CurvePoint]) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return by micro-batch the peaks of trials that ran, the line through all that is known, and the least budgets."""
    near = [one for one in curve if one.size <= _FURTHEST * plan.largest_fit + 1]
    peaks = {size: one.peak_reserved_bytes or 0 for size, one in tried_sizes(plan).items() if one.ran}
    peaks = {size: peak for size, peak in peaks.items() if peak}
    least = {one.size: one.least_bytes for one in near if one.least_bytes is not None}
    return peaks, {one.size: one.peak_bytes for one in near} or peaks, least


def held_over_time(timeline: Timeline) -> tuple[dict[Category, tuple[int, ...]], list[int]]:
    """Return the bytes in use over time by category, of those that ever hold some, and in all."""
    held = {one: timeline.categories[one] for one in CATEGORIES if any(timeline.categories.get(one) or ())}
    return held, list(map(sum, zip(*held.values(), strict=True))) or [0] * len(timeline.reserved_bytes)


def drawn_phases(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Yield the phases that can be seen: first and last point, and name, which is empty for the preparation."""
    last, phases = len(timeline.reserved_bytes) - 1, timeline.phases
    for number, (start, phase) in enumerate(phases):
        end, following = phases[number + 1] if number + 1 < len(phases) else (last, None)
        if following is None or _PART_OF_NEXT.get(phase) != following:
            yield start, end, "" if phase in _PREPARATION else phase
