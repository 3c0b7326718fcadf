"""One panel with a title, what its marks mean, and a line of remarks below: all of a study's pictures are such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from autoaccum.reporting.pictures.page import write_line
from autoaccum.reporting.pictures.theme import TITLE_POINTS, colour, pointing
from autoaccum.reporting.pictures.tuning_scale import Losses
from autoaccum.reporting.tune_words import format_rate

Remark = tuple[str, str]
"""A text and the role of its colour."""

_WIDTH, _PANEL = 8.0, 2.6
_LEFT, _RIGHT = 0.85, 0.75
_TITLE, _LINE, _ROW = 0.35, 0.21, 0.19
_ABOVE, _UNDER = 0.2, 0.7
"""Between the marks, or the names of lines, and the panel; between the panel and the remarks, for ticks."""
_FEW_DECADES = 3
_MOST_TICKS = 8


def make_panel(
    title: str, marks: Sequence[Remark], below: Sequence[str] = (), *, names: int = 0
) -> tuple[Figure, Axes]:
    """A figure with one panel.

    Args:
        title: What is shown, of what.
        marks: What the marks mean, each in its own colour.
        below: Lines under the panel: sources, what was left out.
        names: Rows above the panel that `point_down` needs.
    """
    rows = _in_rows(marks)
    top = _TITLE + 0.11 + _LINE * len(rows) + _ABOVE + _LINE * names
    height = top + _PANEL + _UNDER + _LINE * len(below)
    figure = _blank(height)
    write_line(figure, title, _LEFT, _TITLE, size=TITLE_POINTS, weight="bold")
    for number, row in enumerate(rows):
        _write_row(figure, row, _TITLE + 0.11 + _LINE * (number + 1))
    for number, text in enumerate(below):
        write_line(figure, text, _LEFT, height - 0.15 - _LINE * (len(below) - 1 - number), role="muted")
    box = (_LEFT / _WIDTH, 1 - (top + _PANEL) / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, _PANEL / height)
    axes = figure.add_axes(box, facecolor="none")
    axes.tick_params(which="both", colors=colour("muted"), labelcolor=colour("ink"), length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colour("muted"))
    return figure, axes


def _blank(height: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, height), facecolor=colour("panel"))
    FigureCanvasAgg(figure)
    return figure


def _in_rows(marks: Sequence[Remark]) -> list[list[Remark]]:
    """As many marks in each row as there is room for."""
    rows: list[list[Remark]] = []
    measured, room = _blank(1.0), 0.0
    for text, role in marks:
        width = write_line(measured, text, 0, 0.5) + _ROW
        if width > room or not rows:
            rows.append([])
            room = _WIDTH - _LEFT
        rows[-1].append((text, role))
        room -= width
    return rows


def _write_row(figure: Figure, row: Sequence[Remark], y: float) -> None:
    x = _LEFT
    for text, role in row:
        x = write_line(figure, text, x, y, role=role) + _ROW


def name_axes(axes: Axes, across: str, up: str) -> None:
    """What is on the axes."""
    axes.set_xlabel(across, color=colour("ink"))
    axes.set_ylabel(up, color=colour("ink"))


def scale_rates(axes: Axes, low: float, high: float, *, up: bool = False) -> None:
    """Learning rates on a logarithmic axis: across, or `up`."""
    axis = axes.yaxis if up else axes.xaxis
    (axes.set_yscale if up else axes.set_xscale)("log")
    (axes.set_ylim if up else axes.set_xlim)(low, high)
    few = high / low < 10**_FEW_DECADES
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=_MOST_TICKS))
    axis.set_major_formatter(FuncFormatter(lambda value, position: format_rate(value)))
    axis.set_minor_formatter(NullFormatter())
    if few:
        axis.set_minor_locator(NullLocator())


def scale_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Sizes across, by their logarithm, with as many of them named as there is room for."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 2**0.5, max(sizes) * 2**0.5)
    every = -(-len(sizes) // 12)
    shown = sorted(set(sizes))[::-1][::every]
    axes.xaxis.set_major_locator(FixedLocator([float(size) for size in shown]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def scale_losses(axes: Axes, losses: Losses) -> None:
    """Losses up, with some room at both ends; without any, an axis without figures."""
    if losses.logarithmic:
        axes.set_yscale("log")
        room = (losses.high / losses.low) ** 0.06
        axes.set_ylim(losses.low / room, losses.high * room)
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        room = 0.06 * (losses.high - losses.low)
        axes.set_ylim(losses.low - room, losses.high + room)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6) if losses.known else NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:.4g}"))


def point_down(axes: Axes, x: float, name: str, role: str = "ink", *, before: bool = False, row: int = 0) -> None:
    """A line at `x` over the whole height, with its name above.

    Args:
        axes: Where to.
        x: The place.
        name: What is there.
        role: Of the colour.
        before: The name ends at the line, rather than begins there, as far as there is room.
        row: 0: just above; 1: above that.
    """
    top = 1.04 + 0.08 * row
    across = axes.get_xaxis_transform()
    line = pointing() | {"color": colour(role)}
    axes.plot([x, x], [0, top], transform=across, clip_on=False, zorder=1, **line)
    drawn = _write_beside(axes, x, top, name, role, before=before)
    box, edges = drawn.get_window_extent(), axes.bbox
    free = _RIGHT / _WIDTH * axes.figure.bbox.width
    if box.x1 > edges.x1 + free or box.x0 < axes.figure.bbox.x0:
        drawn.remove()
        _write_beside(axes, x, top, name, role, before=not before)


def _write_beside(axes: Axes, x: float, top: float, name: str, role: str, *, before: bool) -> Annotation:
    style: dict[str, Any] = {"ha": "right" if before else "left", "va": "top", "color": colour(role), "zorder": 6}
    place: dict[str, Any] = {"xytext": (-4 if before else 4, 2), "textcoords": "offset points"}
    return axes.annotate(name, (x, top), xycoords=axes.get_xaxis_transform(), annotation_clip=False, **place, **style)
