"""The blocks that the terminal shows, and of a plan pictures, as HTML without a network: a page, or in a notebook."""

from __future__ import annotations

from base64 import b64encode
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
from autoaccum.planning.comparison_record import Comparison
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.comparison_table import comparison_blocks, comparison_warnings
from autoaccum.reporting.console import Block, Facts, Table, clean
from autoaccum.reporting.explain_report import explanation_blocks
from autoaccum.reporting.figures import COLOURS, draw_curve, draw_panels, draw_timeline, plan_title
from autoaccum.reporting.plan_report import answer_rows, detail_rows, measured_peak, speeds_table
from autoaccum.reporting.progress import trials_table
from autoaccum.reporting.verify_report import verification_blocks
from autoaccum.serialization import to_plain
from autoaccum.verification.verification_result import Verification

_COLOURS: Final = {
    **{role: COLOURS[role] for role in ("panel", "ink", "muted", "limit", "ran", "room")},
    "page": ("#f6f8fa", "#010409"),
    "edge": ("#d1d9e0", "#30363d"),
    "warn": ("#9a6700", "#d29922"),
}


@dataclass(frozen=True)
class Picture:
    """A picture by matplotlib: what it shows, and its SVG as an element of a page."""

    name: str
    svg: str

    @property
    def address(self) -> str:
        """The picture as the address of an image, in which its styles and identifiers stay its own."""
        return f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}"


def render_page(kind: str, title: str, sections: Mapping[str, Sequence[Block | Picture]], command: str) -> str:
    """Return an HTML file that loads nothing: sections by their titles, and the command that made it."""
    about = {"kind": f"autoaccum {kind}", "command": command, "version": autoaccum.__version__}
    return _render("page.html.jinja", title, sections, **about)


def render_record(record: Plan | Comparison | Verification) -> str:
    """Return what a notebook shows of a record: an element with styles of its own, dark where the notebook is."""
    if isinstance(record, Plan):
        title, sections = plan_title(record), plan_sections(record, None)
    elif isinstance(record, Comparison):
        warnings = Facts.of_messages(comparison_warnings(record.rows), ())
        title, sections = "Plans compared", {"Comparison": [*comparison_blocks(record), warnings]}
    else:
        title = f"Verification of {record.workload['name']}"
        sections = {"Verification": verification_blocks(record, verbose=True)}
    return _render("notebook.html.jinja", title, sections)


def _render(template: str, title: str, sections: Mapping[str, Sequence[Block | Picture]], **about: str) -> str:
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
    return environment.get_template(template).render(
        title=clean(title).plain,
        sections={title: blocks for title, blocks in named.items() if blocks},
        colours=" ".join(f"--{role}: light-dark({light}, {dark});" for role, (light, dark) in _COLOURS.items()),
        clean=clean,
        cells=_cells,
        **about,
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
    explanation = plan.explanation if report is None else report.explanation
    if explanation is None and (plan.device.kind == "cpu" or plan.workload.command):
        notes.append(message("memory_unknown"))
    timeline: list[Picture] = []
    if report is not None:
        drawn = partial(draw_timeline, plan=plan, report=report)
        timeline = [_picture("the memory of an update over time, by purpose", drawn)]
    memory = [] if explanation is None else explanation_blocks(explanation, measured_peak(plan))
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
