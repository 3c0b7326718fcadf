"""The picture of a comparison: a bar for each row, as long as it is fast, or else as its micro-batch is large."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial

from matplotlib.figure import SubFigure

from autoaccum.planning.comparison import Comparison, ComparisonRow
from autoaccum.planning.saver_choice import format_savers
from autoaccum.reporting.comparison_table import shown_rows
from autoaccum.reporting.figures.colours import LIGHT
from autoaccum.reporting.figures.style import Format, draw_panels

_LINE_HEIGHT, _ROW_MARGIN, _MARGIN = 0.15, 0.11, 1.2
_LONGEST_LINE = 40


def draw_comparison(comparison: Comparison, form: Format) -> bytes:
    """Draw the rows of the table as a file: the same rows give the same bytes."""
    rows = shown_rows(comparison.rows)
    names = [_name(row, rows) for row in rows]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    height = _MARGIN + (_ROW_MARGIN + _LINE_HEIGHT * lines) * len(rows)
    return draw_panels([partial(_draw_bars, rows=rows, names=names)], form, title=_title(rows), height=height)


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


def _name(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> str:
    named = [row.card] if len({row.card for row in rows}) > 1 else []
    named += [f"{row.world_size} ranks"] if len({row.world_size for row in rows}) > 1 else []
    named += [format_savers(row.savers)] if any(row.savers for row in rows) and row.fits else []
    return textwrap.fill(", ".join(named) or row.card, _LONGEST_LINE)


def _title(rows: Sequence[ComparisonRow]) -> str:
    cards = list(dict.fromkeys(row.card for row in rows))
    where = cards[0] if len(cards) == 1 else f"{len(cards)} cards"
    targets = [row.plan.target_batch for row in rows if row.plan is not None]
    return f"{targets[0]} samples per update on {where}" if targets else where
