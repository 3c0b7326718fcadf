"""The pictures of plans: the memory of an update over time, the peaks of other sizes, and several plans as bars."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from autoaccum.devices.base import Outcome, Trial
from autoaccum.devices.explanation import CurvePoint, MemoryReport, Timeline
from autoaccum.planning.comparison import Comparison, ComparisonRow
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.saver_trials import format_savers
from autoaccum.reporting.comparison_table import shown_rows
from autoaccum.reporting.figures.style import LIGHT, Format, cut, draw_panels, label, pointing
from autoaccum.simulation.trace_records import CATEGORIES
from autoaccum.units import GIB, KIB, MIB, format_bytes

_LEAST_SHARE = 0.002
"""Categories with a smaller share of the peak are not in the legend."""
_FURTHEST = 1.6
"""Sizes beyond this multiple of the largest that fits are not drawn."""
_FAR = 3.0
"""A limit beyond this multiple of all else is only named, since it would flatten the rest."""
_NARROWEST = 0.05
"""The least share of the width for a phase to be named."""
_LONGEST_REMARK = 90
_PART_OF_NEXT = {"batch": "forward", "clip": "update"}
"""Phases too short to be seen: copying a part to the card, and the norm."""
_LINE_HEIGHT, _ROW_MARGIN, _MARGIN = 0.15, 0.11, 1.2
"""Of the bars of several plans, in inches."""
_LONGEST_NAME = 40
_PREPARATION = ("start", "load", "model", "optimizer")


def draw_memory(plan: Plan, report: MemoryReport | None, form: Format) -> bytes:
    """Draw a plan, with its memory report if there is one, as a file: the same plan gives the same bytes."""
    curve = () if report is None else report.curve
    panels = [partial(draw_curve, plan=plan, curve=curve)]
    if report is not None:
        panels.insert(0, partial(draw_timeline, plan=plan, report=report))
    return draw_panels(panels, form, title=plan_title(plan))


def plan_title(plan: Plan) -> str:
    """Return the model, the device and the sizes in one line."""
    model = str(plan.workload.get("model") or plan.workload.get("name") or "Memory")
    sizes = f"{plan.micro_batch} of {plan.target_batch} samples at a time"
    if plan.iter_size == 1 and plan.world_size == 1:
        sizes = "1 sample" if plan.micro_batch == 1 else f"{plan.micro_batch} samples at once"
    return f"{model} on {plan.device.get('name', 'this device')}, {sizes}"


def draw_timeline(figure: SubFigure, *, plan: Plan, report: MemoryReport) -> None:
    """Draw the memory of an update over its events, by category, with the limit."""
    axes = figure.subplots()
    timeline, explanation = report.timeline, report.explanation
    reserved, at = timeline.reserved_bytes, range(len(timeline.reserved_bytes))
    held = {one: timeline.categories[one] for one in CATEGORIES if any(timeline.categories.get(one) or ())}
    used = list(map(sum, zip(*held.values(), strict=True))) or [0] * len(reserved)
    areas = axes.stackplot(at, *held.values(), colors=[LIGHT[one] for one in held], step="post", linewidth=0)
    cached: dict[str, Any] = {"facecolor": "none", "edgecolor": LIGHT["unused"], "hatch": "//", "linewidth": 0}
    top = list(map(max, used, reserved))
    areas.append(axes.fill_between(at, used, top, step="post", **cached))
    for category, area in zip([*held, "unused"], areas, strict=True):
        bytes_ = explanation.categories.get(category, 0)
        if bytes_ >= _LEAST_SHARE * explanation.peak_bytes:
            area.set_label(f"{label(category)}: {format_bytes(bytes_)}")
    axes.step(at, reserved, where="post", color=LIGHT["ink"], linewidth=1.2)
    peak = f"peak: {format_bytes(explanation.peak_bytes)}"
    axes.plot(timeline.peak_at, explanation.peak_bytes, "v", color=LIGHT["ink"], label=peak)
    axes.set_xlim(0, max(len(reserved) - 1, 1))
    _name_phases(axes, timeline)
    _finish(axes, plan.limit_bytes, max(explanation.peak_bytes, *reserved))
    axes.set_title(cut(_peak_remark(plan, report), _LONGEST_REMARK))
    figure.legend(loc="outside lower left", ncols=3, reverse=True)


def _peak_remark(plan: Plan, report: MemoryReport) -> str:
    """Say where most is held."""
    explanation = report.explanation
    known = "" if plan.kind == "predicted" else "simulated: "
    where = f" of {explanation.module}" if explanation.module else ""
    return f"{known}most is held in {explanation.phase}, at {explanation.op}{where}"


def _name_phases(axes: Axes, timeline: Timeline) -> None:
    """Name the phases under the axis, where there is room, with lines between them."""
    last = len(timeline.reserved_bytes) - 1
    named = [
        (name if end - start >= _NARROWEST * last else "", (start + end) / 2)
        for start, end, name in _seen_phases(timeline)
    ]
    for start, _ in timeline.phases:
        axes.axvline(start, color=LIGHT["panel"], linewidth=0.8)
    axes.set_xticks([middle for _, middle in named], [name for name, _ in named])
    axes.tick_params("x", length=0)


def _seen_phases(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Yield the phases that can be seen: first and last point, and name, which is empty for the preparation."""
    last, phases = len(timeline.reserved_bytes) - 1, timeline.phases
    for number, (start, phase) in enumerate(phases):
        end, following = phases[number + 1] if number + 1 < len(phases) else (last, None)
        if following is None or _PART_OF_NEXT.get(phase) != following:
            yield start, end, "" if phase in _PREPARATION else phase


def draw_curve(figure: SubFigure, *, plan: Plan, curve: Sequence[CurvePoint]) -> None:
    """Draw the peak over the micro-batch: the sizes tried, the chosen one, and the headroom below the limit."""
    axes = figure.subplots()
    tried, near = _tried_sizes(plan), [point for point in curve if point.size <= _FURTHEST * plan.largest_fit + 1]
    peaks = {size: peak for size, trial in tried.items() if trial.ran and (peak := trial.peak_reserved_bytes)}
    line = {point.size: point.peak_bytes for point in near} or peaks
    axes.plot(list(line), list(line.values()), color=LIGHT["ran"])
    top = _finish(axes, plan.limit_bytes, max([plan.peak_bytes or 0, *peaks.values()]))
    ran, failed = ("ran", "did not fit") if plan.kind == "measured" else ("fits", "does not fit")
    looks: dict[Outcome, dict[str, Any]] = {
        "ok": {"marker": "o", "color": LIGHT["ran"], "label": ran},
        "tight": {"marker": "o", "color": LIGHT["ran"], "markerfacecolor": LIGHT["panel"], "label": "tight"},
        "oom": {"marker": "x", "color": LIGHT["limit"], "label": failed, "markeredgewidth": 1.8},
    }
    for outcome, look in looks.items():
        sizes = [size for size, trial in tried.items() if trial.outcome == outcome]
        # A trial that ran out of memory held less than the limit, so its peak would look as if it fitted.
        failed_at = min(1.03 * plan.limit_bytes, top)
        at = [failed_at if outcome == "oom" else tried[size].peak_reserved_bytes or 0 for size in sizes]
        if sizes:
            axes.plot(sizes, at, linestyle="none", clip_on=False, zorder=4, **look)
    _mark_choice(axes, plan)
    axes.set_xlim(0, 1.05 * max([plan.micro_batch + 1, *tried, *line]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("micro-batch, in samples")
    figure.legend(loc="outside lower left", ncols=3)


def _tried_sizes(plan: Plan) -> dict[int, Trial]:
    """Return the last trial of each size within the plan's own budget that is to be drawn, ascending."""
    within = [one for one in plan.trials if one.outcome != "error" and one.limit_bytes in (None, plan.limit_bytes)]
    last = sorted({trial.micro_batch: trial for trial in within}.items())
    return {size: trial for size, trial in last if size <= _FURTHEST * plan.largest_fit + 1}


def _mark_choice(axes: Axes, plan: Plan) -> None:
    """Mark the micro-batch with a line, and the headroom above its peak."""
    said = f"micro-batch {plan.micro_batch}"
    axes.axvline(plan.micro_batch, label=said, **pointing())
    if plan.peak_bytes is None or plan.headroom_bytes is None:
        axes.plot([], [], " ", label="peaks were not measured")
        return
    axes.axhline(plan.peak_bytes, label=f"peak: {format_bytes(plan.peak_bytes)}", **pointing())
    if plan.headroom_bytes > 0:
        room: dict[str, Any] = {"facecolor": "none", "edgecolor": LIGHT["room"], "hatch": "\\\\\\", "linewidth": 0}
        left = f"headroom: {format_bytes(plan.headroom_bytes)}"
        axes.fill_between([0, plan.micro_batch], plan.peak_bytes, plan.limit_bytes, label=left, **room)
    else:
        axes.plot([], [], " ", label="within the limit, the allocator packs it closer")


def _finish(axes: Axes, limit_bytes: int, most_bytes: int) -> float:
    """Set up the axis of bytes with the limit; return the end of the axis."""
    far = bool(most_bytes) and limit_bytes > _FAR * most_bytes
    top = 1.25 * most_bytes if far else 1.1 * max(limit_bytes, most_bytes)
    said = f"limit{', far above' if far else ''}: {format_bytes(limit_bytes)}"
    axes.axhline(limit_bytes, color=LIGHT["limit"], linewidth=1.6, label=said)
    axes.set_ylim(0, top)
    known = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    unit, name = next(((unit, name) for unit, name in known if top >= unit), (1, "B"))
    step = next(one for one in (0.1, 0.2, 0.5, 1, 2, 5, *(10 * n for n in range(1, 105))) if top / unit / one <= 6)
    axes.set_yticks([number * step * unit for number in range(int(top / unit / step) + 1)])
    axes.yaxis.set_major_formatter(FuncFormatter(partial(_in_unit, unit, name)))
    return top


def _in_unit(unit: int, name: str, value: float, position: int | None) -> str:
    return f"{value / unit:g} {name}" if value else "0"


def draw_comparison(comparison: Comparison, form: Format) -> bytes:
    """Draw the rows of the table as a file: the same rows give the same bytes."""
    rows = shown_rows(comparison.rows)
    names = [_row_name(row, rows) for row in rows]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    height = _MARGIN + (_ROW_MARGIN + _LINE_HEIGHT * lines) * len(rows)
    return draw_panels(
        [partial(_draw_bars, rows=rows, names=names)], form, title=_comparison_title(rows), height=height
    )


def _draw_bars(figure: SubFigure, *, rows: Sequence[ComparisonRow], names: Sequence[str]) -> None:
    axes, places = figure.subplots(), range(len(rows))
    sizes = [0 if row.plan is None else row.plan.micro_batch for row in rows]
    fastest = max((row.samples_per_second or 0.0 for row in rows), default=0.0)
    lengths = [(row.samples_per_second or 0.0) / fastest for row in rows] if fastest else sizes
    axes.barh(places, lengths, color=LIGHT["ran"])
    for place, size, length in zip(places, sizes, lengths, strict=True):
        said = f"micro-batch {size}" if size else "does not fit"
        axes.annotate(said, (length, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(0, 1.5 * max((*lengths, 0.01)))
    axes.set_xlabel("estimated speed (1: the fastest)" if fastest else "micro-batch")


def _row_name(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> str:
    named = [row.card] if len({row.card for row in rows}) > 1 else []
    named += [f"{row.world_size} ranks"] if len({row.world_size for row in rows}) > 1 else []
    named += [format_savers(row.savers)] if any(row.savers for row in rows) and row.fits else []
    return textwrap.fill(", ".join(named) or row.card, _LONGEST_NAME)


def _comparison_title(rows: Sequence[ComparisonRow]) -> str:
    cards = list(dict.fromkeys(row.card for row in rows))
    where = cards[0] if len(cards) == 1 else f"{len(cards)} cards"
    targets = [row.plan.target_batch for row in rows if row.plan is not None]
    return f"{targets[0]} samples per update on {where}" if targets else where
