"""One panel with a title, what its marks mean, and a line of remarks below: all of a study's pictures are such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from autoaccum.reporting.pictures.page import write_line
from autoaccum.reporting.pictures.theme import TEXT_POINTS, TITLE_POINTS, colour, pointing
from autoaccum.reporting.tune_words import format_rate

Remark = tuple[str, str]
"""A text and the role of its colour."""

_WIDTH, _HEIGHT = 8.0, 4.3
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.85, 0.35, 0.95, 0.95
_FEW_DECADES = 3
_MOST_TICKS = 8


def make_panel(title: str, marks: Sequence[Remark], below: str) -> tuple[Figure, Axes]:
    """A figure with one panel.

    Args:
        title: What is shown, of what.
        marks: What the marks mean, each in its own colour.
        below: One line under the panel: sources, what was left out.
    """
    figure = Figure(figsize=(_WIDTH, _HEIGHT), facecolor=colour("panel"))
    FigureCanvasAgg(figure)
    write_line(figure, title, _LEFT, 0.35, size=TITLE_POINTS, weight="bold")
    x = _LEFT
    for text, role in marks:
        x = write_line(figure, text, x, 0.67, role=role) + 0.2
    if below:
        write_line(figure, below, _LEFT, _HEIGHT - 0.15, role="muted")
    box = (
        _LEFT / _WIDTH,
        _BOTTOM / _HEIGHT,
        (_WIDTH - _LEFT - _RIGHT) / _WIDTH,
        (_HEIGHT - _TOP - _BOTTOM) / _HEIGHT,
    )
    axes = figure.add_axes(box, facecolor="none")
    axes.tick_params(which="both", colors=colour("muted"), labelcolor=colour("ink"), length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colour("muted"))
    return figure, axes


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


def scale_losses(axes: Axes, low: float, high: float) -> None:
    """Losses up, with some room at both ends."""
    room = 0.06 * (high - low)
    axes.set_ylim(low - room, high + room)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:.4g}"))


def point_down(axes: Axes, x: float, name: str, role: str = "ink", *, row: int = 0) -> None:
    """A line at `x` over the whole height, with its name beside its upper end, in rows from above."""
    axes.axvline(x, **pointing() | {"color": colour(role)}, zorder=1)
    at = axes.transData.transform((x, 0))[0]
    before = at > (axes.bbox.x0 + axes.bbox.x1) / 2
    style: dict[str, Any] = {"ha": "right" if before else "left", "va": "top", "color": colour(role), "zorder": 6}
    lines = -TEXT_POINTS * (0.2 + 1.5 * row)
    offset = (-4 if before else 4, lines)
    axes.annotate(name, (x, 1), xycoords=axes.get_xaxis_transform(), xytext=offset, textcoords="offset points", **style)
