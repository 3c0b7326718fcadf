"""The figures of a plan: the memory of an update over time, the peaks of other sizes, and sets of savers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from autoaccum.devices.base import Outcome
from autoaccum.devices.explanation import CurvePoint, MemoryReport
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.saver_choice import format_savers
from autoaccum.planning.saver_table import SaverTable
from autoaccum.reporting.console import one_line
from autoaccum.reporting.figures.colours import label
from autoaccum.reporting.figures.file_format import Format
from autoaccum.reporting.figures.memory_data import (
    LEAST_SHARE,
    drawn_phases,
    held_over_time,
    is_far,
    peak_remark,
    peaks_by_size,
    plan_title,
    tried_sizes,
)
from autoaccum.reporting.figures.style import TITLE_POINTS, colour, picture_bytes, pointing
from autoaccum.units import GIB, KIB, MIB, format_bytes

_WIDTH, _PANEL_HEIGHT = 9.0, 3.4
_LONGEST_TITLE, _LONGEST_REMARK = 70, 90
_NARROWEST = 0.05
"""The least share of the width for a phase to be named."""


def draw_memory(plan: Plan, report: MemoryReport | None, form: Format) -> bytes:
    """Draw a plan, with its memory report if there is one, as a file: the same plan gives the same bytes."""
    return picture_bytes(lambda: memory_figure(plan, report), plan_title(plan), form)


def memory_figure(plan: Plan, report: MemoryReport | None) -> Figure:
    """Return the matplotlib figure; call and draw it within `picture_settings`."""
    panels = 1 if report is None else 2
    size = (_WIDTH, _PANEL_HEIGHT * panels)
    figure = Figure(figsize=size, layout="constrained", facecolor=colour("panel"))
    FigureCanvasAgg(figure)
    figure.suptitle(_cut(plan_title(plan), _LONGEST_TITLE), size=TITLE_POINTS, weight="bold", parse_math=False)
    every = figure.subplots(panels, squeeze=False)[:, 0]
    if report is not None:
        _draw_timeline(every[0], plan, report)
    _draw_curve(every[-1], plan, () if report is None else report.curve)
    return figure


def _draw_timeline(axes: Axes, plan: Plan, report: MemoryReport) -> None:
    """Draw the memory of an update over its events, by category, with the limit."""
    timeline, explanation = report.timeline, report.explanation
    reserved, at = timeline.reserved_bytes, range(len(timeline.reserved_bytes))
    held, used = held_over_time(timeline)
    areas = axes.stackplot(at, *held.values(), colors=[colour(one) for one in held], step="post", linewidth=0)
    cached: dict[str, Any] = {"facecolor": "none", "edgecolor": colour("unused"), "hatch": "//", "linewidth": 0}
    top = list(map(max, used, reserved))
    areas.append(axes.fill_between(at, used, top, step="post", **cached))
    for category, area in zip([*held, "unused"], areas, strict=True):
        bytes_ = explanation.categories.get(category, 0)
        if bytes_ >= LEAST_SHARE * explanation.peak_bytes:
            area.set_label(f"{label(category)}: {format_bytes(bytes_)}")
    axes.step(at, reserved, where="post", color=colour("ink"), linewidth=1.2)
    peak = f"peak: {format_bytes(explanation.peak_bytes)}"
    axes.plot(timeline.peak_at, explanation.peak_bytes, "v", color=colour("ink"), label=peak)
    axes.set_xlim(0, max(len(reserved) - 1, 1))
    _name_phases(axes, report)
    _finish(axes, plan.limit_bytes, max(explanation.peak_bytes, *reserved))
    axes.set_title(_cut(peak_remark(plan, report), _LONGEST_REMARK))


def _name_phases(axes: Axes, report: MemoryReport) -> None:
    """Name the phases under the axis, where there is room, with lines between them."""
    last = len(report.timeline.reserved_bytes) - 1
    named = [
        (name if end - start >= _NARROWEST * last else "", (start + end) / 2)
        for start, end, name in drawn_phases(report.timeline)
    ]
    for start, _ in report.timeline.phases:
        axes.axvline(start, color=colour("panel"), linewidth=0.8)
    axes.set_xticks([middle for _, middle in named], [name for name, _ in named])
    axes.tick_params("x", length=0)


def _draw_curve(axes: Axes, plan: Plan, curve: Sequence[CurvePoint]) -> None:
    """Draw the peak over the micro-batch: the sizes tried, the chosen one, and the headroom below the limit."""
    tried, (peaks, line, least) = tried_sizes(plan), peaks_by_size(plan, curve)
    axes.plot(list(line), list(line.values()), color=colour("ran"))
    if least:
        said = "least budget" if plan.least_bytes is None else f"least budget: {format_bytes(plan.least_bytes)}"
        axes.plot(list(least), list(least.values()), color=colour("muted"), linestyle="--", label=said)
    top = _finish(axes, plan.limit_bytes, max([plan.peak_bytes or 0, *peaks.values()]))
    ran, failed = ("ran", "did not fit") if plan.kind == "measured" else ("fits", "does not fit")
    looks: dict[Outcome, dict[str, Any]] = {
        "ok": {"marker": "o", "color": colour("ran"), "label": ran},
        "tight": {"marker": "o", "color": colour("ran"), "markerfacecolor": colour("panel"), "label": "tight"},
        "oom": {"marker": "x", "color": colour("limit"), "label": failed, "markeredgewidth": 1.8},
    }
    for outcome, look in looks.items():
        sizes = [size for size, one in tried.items() if one.outcome == outcome]
        # A trial that ran out of memory held less than the limit, so its peak would look as if it fitted.
        failed_at = min(1.03 * plan.limit_bytes, top)
        at = [failed_at if outcome == "oom" else tried[size].peak_reserved_bytes or 0 for size in sizes]
        if sizes:
            axes.plot(sizes, at, linestyle="none", clip_on=False, zorder=4, **look)
    _mark_choice(axes, plan)
    axes.set_xlim(0, 1.05 * max([plan.micro_batch + 1, *tried, *line]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("micro-batch, in samples")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _mark_choice(axes: Axes, plan: Plan) -> None:
    """Mark the micro-batch with a line, and the headroom above its peak."""
    said = f"micro-batch {plan.micro_batch}"
    axes.axvline(plan.micro_batch, label=said, **pointing())
    if plan.peak_bytes is None or plan.headroom_bytes is None:
        axes.plot([], [], " ", label="peaks were not measured")
        return
    axes.axhline(plan.peak_bytes, label=f"peak: {format_bytes(plan.peak_bytes)}", **pointing())
    if plan.headroom_bytes > 0:
        room: dict[str, Any] = {"facecolor": "none", "edgecolor": colour("room"), "hatch": "\\\\\\", "linewidth": 0}
        left = f"headroom: {format_bytes(plan.headroom_bytes)}"
        axes.fill_between([0, plan.micro_batch], plan.peak_bytes, plan.limit_bytes, label=left, **room)
    else:
        axes.plot([], [], " ", label="within the limit, the\nallocator packs it closer")


def _finish(axes: Axes, limit_bytes: int, most_bytes: int) -> float:
    """Set up the axis of bytes with the limit and the legend; return the end of the axis."""
    far = is_far(limit_bytes, most_bytes)
    top = 1.25 * most_bytes if far else 1.1 * max(limit_bytes, most_bytes)
    said = f"limit{', far above' if far else ''}: {format_bytes(limit_bytes)}"
    axes.axhline(limit_bytes, color=colour("limit"), linewidth=1.6, label=said)
    axes.set_ylim(0, top)
    known = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    unit, name = next(((unit, name) for unit, name in known if top >= unit), (1, "B"))
    step = next(one for one in (0.1, 0.2, 0.5, 1, 2, 5, *(10 * n for n in range(1, 105))) if top / unit / one <= 6)
    axes.set_yticks([number * step * unit for number in range(int(top / unit / step) + 1)])
    axes.yaxis.set_major_formatter(FuncFormatter(partial(_in_unit, unit, name)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
    return top


def _in_unit(unit: int, name: str, value: float, position: int | None) -> str:
    return f"{value / unit:g} {name}" if value else "0"


def _cut(text: str, longest: int) -> str:
    text = one_line(text)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


_LEAST_RATIO = 1.06
_ROW_HEIGHT = 0.22


def draw_savers(table: SaverTable, form: Format) -> bytes:
    """Draw a table as a file: the same table gives the same bytes."""
    return picture_bytes(lambda: savers_figure(table), _savers_title(table), form)


def savers_figure(table: SaverTable) -> Figure:
    """Return the matplotlib figure; call and draw it within `picture_settings`."""
    rows = table.rows
    figure = Figure(
        figsize=(_WIDTH, _PANEL_HEIGHT + _ROW_HEIGHT * len(rows)), layout="constrained", facecolor=colour("panel")
    )
    FigureCanvasAgg(figure)
    figure.suptitle(_savers_title(table), size=TITLE_POINTS, weight="bold", parse_math=False)
    axes = figure.subplots()
    times, sizes = [row.relative_time for row in rows], [row.micro_batch for row in rows]
    axes.step(times, sizes, where="post", color=colour("muted"), linestyle="--")
    for number, row in enumerate(rows, start=1):
        said = f"{number}: {format_savers(row.savers)}"
        axes.plot(row.relative_time, row.micro_batch, "o", color=colour("ran"), label=said)
        axes.annotate(
            str(number), (row.relative_time, row.micro_batch), xytext=(-6, 4), textcoords="offset points", ha="right"
        )
    axes.set_yscale("log", base=2)
    ticks = _spread_sizes(sizes)
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_xlim(0.95 * min(times), 1.08 * max(times))
    axes.set_xlabel("estimated time of an update (1: without savers, in the fewest micro-batches)")
    axes.set_ylabel("largest micro-batch, in samples")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, handlelength=0, handletextpad=0, markerscale=0)
    return figure


def _spread_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes to be named on the axis, far enough from each other."""
    named: list[int] = []
    for size in sorted(sizes):
        if not named or size >= _LEAST_RATIO * named[-1]:
            named.append(size)
    return named


def _savers_title(table: SaverTable) -> str:
    return f"Savers on {table.device} with {format_bytes(table.limit_bytes)}, {table.target_batch} samples per update"
