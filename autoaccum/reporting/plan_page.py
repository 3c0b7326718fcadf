"""The page of a plan: the answer, the memory of an update, where it goes, what would change it, and the trials."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.explanation import Explanation, MemoryReport
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Throughput
from autoaccum.reporting.console import one_line
from autoaccum.reporting.explain_report import changes_table, explanation_lines, module_name
from autoaccum.reporting.figures.plan_figures import draw_curve, draw_timeline, plan_title
from autoaccum.reporting.figures.style import draw_panels, label
from autoaccum.reporting.figures.tuning_figure import draw_throughput
from autoaccum.reporting.page import (
    Bar,
    Bars,
    Block,
    Facts,
    Grid,
    Heading,
    Lines,
    Messages,
    Page,
    Picture,
    Piece,
    Section,
    Tone,
    plain_facts,
    purpose_legend,
    purpose_pieces,
)
from autoaccum.reporting.plan_report import answer_rows, detail_rows, speeds_table
from autoaccum.reporting.progress import trials_table
from autoaccum.units import format_bytes, percent

_OF_A_CARD = "where memory goes is known for cards: --gpu NAME simulates one"


def plan_page(plan: Plan, report: MemoryReport | None, seconds: float | None = None) -> Page:
    """Return the page of a plan, with its memory report if there is one, and the time that planning took."""
    # What is cached beyond what is needed may exceed the budget, which looks as if the plan did not fit.
    name, size = ("peak", plan.peak_bytes) if plan.least_bytes is None else ("needed", plan.least_bytes)
    tiles: list[tuple[str, str, Tone]] = [
        ("micro-batch, in samples", str(plan.micro_batch), "good"),
        ("micro-batches per update (iter_size)", str(plan.iter_size), ""),
        (
            f"{name}, predicted" if plan.kind == "predicted" else name,
            "not measured" if size is None else format_bytes(size),
            "",
        ),
        ("budget", format_bytes(plan.limit_bytes), ""),
    ]
    return Page(
        kind=f"autoaccum plan, {plan.kind}",
        title=one_line(plan_title(plan)),
        tiles=tiles,
        sections=plan_sections(plan, report, seconds),
    )


def plan_sections(plan: Plan, report: MemoryReport | None = None, seconds: float | None = None) -> list[Section]:
    """Return the sections of a plan."""
    curve = partial(draw_curve, plan=plan, curve=() if report is None else report.curve)
    sections = [
        Section("Plan", (Facts.of([*answer_rows(plan), *detail_rows(plan, seconds)]), *_messages(plan, report)))
    ]
    if report is not None:
        explanation, measured = report.explanation, plan.peak_bytes if plan.kind == "measured" else None
        sections += [
            Section("Memory over one update", (_timeline(plan, report),)),
            Section("Where the memory goes", tuple(_account(explanation, measured))),
            Section("What would change it", _table(changes_table(explanation.changes))),
        ]
    return [
        *sections,
        Section("Peak over the micro-batch", (Picture("the peak over the micro-batch", draw_panels([curve])),)),
        Section("Schedule of one update", (_schedule(plan),)),
        Section("Throughput", () if plan.throughput is None else throughput_blocks(plan.throughput)),
        Section("Trials", _table(trials_table(plan))),
        Section("Made with", (Facts.of([*plain_facts(plan.workload), *plain_facts(plan.environment)]),)),
    ]


def _timeline(plan: Plan, report: MemoryReport) -> Picture:
    svg = draw_panels([partial(draw_timeline, plan=plan, report=report)])
    return Picture("the memory of an update over time, by purpose", svg)


def throughput_blocks(known: Throughput) -> tuple[Block, ...]:
    """Return the picture and the table of samples per second."""
    svg = draw_panels([partial(draw_throughput, known=known)])
    return Picture("samples per second over the micro-batch", svg), *_table(speeds_table(known))


def _account(explanation: Explanation, measured_bytes: int | None) -> Iterator[Block]:
    """Yield where the peak is, its bytes by purpose, and by module."""
    yield Lines(tuple(explanation_lines(explanation, measured_bytes)))
    held, peak = {one: bytes_ for one, bytes_ in explanation.categories.items() if bytes_}, explanation.peak_bytes
    bars = [
        Bar(label(one), purpose_pieces({one: bytes_}), f"{format_bytes(bytes_)}, {percent(bytes_, peak)}")
        for one, bytes_ in held.items()
    ]
    bars.append(Bar("CUDA context", (), f"{format_bytes(explanation.context_bytes)}, on top"))
    yield Heading("By purpose")
    yield Bars(tuple(bars), max([*held.values(), 1]))
    if not explanation.modules:
        return
    rows = []
    for share in explanation.modules:
        about = f"{share.count} x {share.kind}" if share.kind and share.count > 1 else share.kind
        rows.append(Bar(module_name(share), purpose_pieces(share.categories), format_bytes(share.bytes), about))
    yield Heading("By module")
    legend = purpose_legend([one for share in explanation.modules for one in share.categories])
    yield Bars(tuple(rows), max(1, *(share.bytes for share in explanation.modules)), legend)


def _schedule(plan: Plan) -> Bars:
    """Return the micro-batches of one update: a bar for each kind of rank."""
    kinds: dict[tuple[int, ...], int] = {}
    for parts in plan.ranks or (plan.micro_batches,):
        kinds[parts] = kinds.get(parts, 0) + 1
    bars = []
    for parts, ranks in kinds.items():
        runs = [(size, len(list(run))) for size, run in groupby(parts)]
        pieces = tuple(Piece(size * count, "ran", f"{count} x {size}", count) for size, count in runs)
        name = "one update" if plan.ranks is None else "1 rank" if ranks == 1 else f"each of {ranks} ranks"
        bars.append(Bar(name, pieces, f"{sum(parts)} samples", format_parts(parts)))
    return Bars(tuple(bars), max(map(sum, kinds)), is_schedule=True)


def _messages(plan: Plan, report: MemoryReport | None) -> tuple[Block, ...]:
    notes = [*plan.notes, *(note for note in (() if report is None else report.notes) if note not in plan.notes)]
    if report is None and plan.device.get("kind") == "cpu":
        notes.append(_OF_A_CARD)
    every = [*(("warning", text) for text in plan.warnings), *(("note", text) for text in notes)]
    return (Messages.of(every),) if every else ()


def _table(table: Any) -> tuple[Block, ...]:
    return (Grid.of(table),) if table.rows else ()
