"""Pages: the blocks that the terminal shows, and of a plan pictures, as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import jinja2
from rich.text import Text

import autoaccum
from autoaccum.devices.explanation import MemoryReport
from autoaccum.messages import message
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.console import Block, Facts, Table, clean
from autoaccum.reporting.explain_report import explanation_blocks
from autoaccum.reporting.figures import COLOURS, draw_curve, draw_panels, draw_timeline
from autoaccum.reporting.plan_report import answer_rows, detail_rows, measured_peak, speeds_table
from autoaccum.reporting.progress import trials_table
from autoaccum.serialization import to_plain

_COLOURS: Final = {
    **COLOURS,
    "page": ("#f6f8fa", "#010409"),
    "edge": ("#d1d9e0", "#30363d"),
    "warn": ("#9a6700", "#d29922"),
}


@dataclass(frozen=True)
class Picture:
    """A picture by matplotlib: what it shows, and its SVG as an element of a page."""

    name: str
    svg: str


def render_page(kind: str, title: str, sections: Mapping[str, Sequence[Block | Picture]], command: str) -> str:
    """Return an HTML file that loads nothing: sections by their titles, and the command that made it."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
    )
    named = {
        title: [(type(block).__name__.lower(), block) for block in blocks if block]
        for title, blocks in sections.items()
    }
    return environment.get_template("page.html.jinja").render(
        kind=f"autoaccum {kind}",
        title=clean(title).plain,
        sections={title: blocks for title, blocks in named.items() if blocks},
        colours=_COLOURS,
        clean=clean,
        cells=_cells,
        command=command,
        version=autoaccum.__version__,
    )


def plan_sections(
    plan: Plan, report: MemoryReport | None, seconds: float | None = None
) -> dict[str, Sequence[Block | Picture]]:
    """Return what the page of a plan shows, by its titles.

    Args:
        plan: The plan.
        report: Where its memory goes, if that is known.
        seconds: The time that planning took.
    """
    notes = list(dict.fromkeys([*plan.notes, *(() if report is None else report.notes)]))
    if report is None and (plan.device.kind == "cpu" or plan.workload.command):
        notes.append(message("memory_unknown"))
    timeline: list[Picture] = []
    memory: list[Block] = []
    if report is not None:
        drawn = partial(draw_timeline, plan=plan, report=report)
        timeline = [_picture("the memory of an update over time, by purpose", drawn)]
        memory = explanation_blocks(report.explanation, measured_peak(plan))
    curve = partial(draw_curve, plan=plan, curve=() if report is None else report.curve)
    return {
        "Plan": [Facts([*answer_rows(plan), *detail_rows(plan, seconds)]), Facts.of_messages(plan.warnings, notes)],
        "Memory over one update": timeline,
        "Where the memory goes": memory,
        "Peak over the micro-batch": [_picture("the peak over the micro-batch", curve)],
        "Throughput": [] if plan.throughput is None else [speeds_table(plan.throughput)],
        "Trials": [trials_table(plan)],
    }


def _picture(name: str, draw: Any) -> Picture:
    text = draw_panels([draw]).decode()
    return Picture(name, text[text.index("<svg") :])


def _cells(table: Table) -> list[list[tuple[str, str, bool]]]:
    """Return the rows of a table: for each cell its text, its style, and whether it is a number."""
    columns = [[(cell, column.justify == "right") for cell in column.cells] for column in table.columns]
    return [
        [(cell.plain, f"{cell.style} {row.style}", is_figure) for cell, is_figure in cells]
        for row, cells in zip(table.rows, zip(*columns, strict=True), strict=True)
        if all(isinstance(cell, Text) for cell, _ in cells)
    ]


def made_with(*records: Any) -> Facts:
    """Return what records hold that is a word or a number."""
    return Facts(
        [
            (name.replace("_", " "), f"{value:,}" if name.startswith("parameter") else str(value))
            for record in records
            for name, value in to_plain(record).items()
            if isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
        ]
    )
