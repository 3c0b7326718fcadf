"""The figure of savers: the largest micro-batch over the estimated time of an update."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from autoaccum.planning.saver_choice import format_savers
from autoaccum.planning.saver_table import SaverTable
from autoaccum.reporting.figures.file_format import Format
from autoaccum.reporting.figures.style import TITLE_POINTS, colour, picture_bytes
from autoaccum.units import format_bytes

_LEAST_RATIO = 1.06
_WIDTH, _HEIGHT, _ROW_HEIGHT = 9.0, 3.4, 0.22


def draw_savers(table: SaverTable, form: Format) -> bytes:
    """Draw a table as a file: the same table gives the same bytes."""
    return picture_bytes(lambda: savers_figure(table), _title(table), form)


def savers_figure(table: SaverTable) -> Figure:
    """Return the matplotlib figure; call and draw it within `picture_settings`."""
    rows = table.rows
    figure = Figure(
        figsize=(_WIDTH, _HEIGHT + _ROW_HEIGHT * len(rows)), layout="constrained", facecolor=colour("panel")
    )
    FigureCanvasAgg(figure)
    figure.suptitle(_title(table), size=TITLE_POINTS, weight="bold", parse_math=False)
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
    ticks = _spread(sizes)
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_xlim(0.95 * min(times), 1.08 * max(times))
    axes.set_xlabel("estimated time of an update (1: without savers, in the fewest micro-batches)")
    axes.set_ylabel("largest micro-batch, in samples")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, handlelength=0, handletextpad=0, markerscale=0)
    return figure


def _spread(sizes: Sequence[int]) -> list[int]:
    """Return the sizes to be named on the axis, far enough from each other."""
    named: list[int] = []
    for size in sorted(sizes):
        if not named or size >= _LEAST_RATIO * named[-1]:
            named.append(size)
    return named


def _title(table: SaverTable) -> str:
    return f"Savers on {table.device} with {format_bytes(table.limit_bytes)}, {table.target_batch} samples per update"
