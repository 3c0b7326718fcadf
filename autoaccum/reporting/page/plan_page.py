"""The page of a plan: the answer, the memory of an update, where it goes, what would change it, and the trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.base import Outcome, Trial
from autoaccum.devices.explanation import CATEGORIES, Category, CurvePoint, Explanation, MemoryReport
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Throughput
from autoaccum.reporting.console import one_line
from autoaccum.reporting.explain_report import changes_table, explanation_lines, module_name
from autoaccum.reporting.figures.colours import label
from autoaccum.reporting.figures.memory_data import (
    LEAST_SHARE,
    drawn_phases,
    held_over_time,
    is_far,
    peaks_by_size,
    plan_title,
    tried_sizes,
)
from autoaccum.reporting.page.blocks import (
    Axis,
    Bar,
    Bars,
    Block,
    Chart,
    Facts,
    Grid,
    Heading,
    Legend,
    Lines,
    Look,
    Messages,
    Page,
    Piece,
    Rule,
    Section,
    Series,
    Tone,
)
from autoaccum.reporting.plan_report import answer_rows, detail_rows, speeds_table, trials_table
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
    curve = peak_chart(plan, () if report is None else report.curve)
    sections = [
        Section("Plan", (Facts.of([*answer_rows(plan), *detail_rows(plan, seconds)]), *_messages(plan, report)))
    ]
    if report is not None:
        explanation, measured = report.explanation, plan.peak_bytes if plan.kind == "measured" else None
        sections += [
            Section("Memory over one update", (memory_chart(plan, report),)),
            Section("Where the memory goes", tuple(_account(explanation, measured))),
            Section("What would change it", _table(changes_table(explanation.changes))),
        ]
    return [
        *sections,
        Section("Peak over the micro-batch", () if curve is None else (curve,)),
        Section("Schedule of one update", (_schedule(plan),)),
        Section("Throughput", () if plan.throughput is None else throughput_blocks(plan.throughput)),
        Section("Trials", _table(trials_table(plan))),
        Section("Made with", (Facts.of([*plain_facts(plan.workload), *plain_facts(plan.environment)]),)),
    ]


def memory_chart(plan: Plan, report: MemoryReport) -> Chart:
    """Return the memory of an update over its events, by category, with the limit."""
    timeline, explanation = report.timeline, report.explanation
    reserved, last = timeline.reserved_bytes, len(timeline.reserved_bytes) - 1
    held, used = held_over_time(timeline)
    held["unused"] = tuple(max(0, all_of - part) for all_of, part in zip(reserved, used, strict=True))
    most = max(explanation.peak_bytes, *reserved)
    areas = [
        Series(name=label(one), role=one, look="area", y=values, step=True, entry=_entry(explanation, one))
        for one, values in held.items()
    ]
    peak, at = explanation.peak_bytes, timeline.peak_at
    return Chart(
        name="the memory of an update over time, by purpose",
        x=Axis("requests of memory over one update"),
        y=Axis("memory", "bytes", zero=True),
        series=(
            *areas,
            Series(name="reserved", role="ink", look="line", y=reserved, step=True),
            Series(name=f"peak: {format_bytes(peak)}", role="ink", look="dot", x=(at,), y=(peak,), texts=("here",)),
        ),
        range=(0, max(last, 1)),
        rules=(_limit(plan, most),),
        spans=tuple((start, end + (end == last), name) for start, end, name in drawn_phases(timeline)),
    )


def peak_chart(plan: Plan, curve: Sequence[CurvePoint]) -> Chart | None:
    """Return the peak over the micro-batch: the sizes tried, the chosen one, and the limit; None if none is known."""
    tried, (peaks, line, least) = tried_sizes(plan), peaks_by_size(plan, curve)
    if not line:
        return None
    most = max([plan.peak_bytes or 0, *peaks.values()])
    limit = _limit(plan, most)
    ran, failed = ("ran", "did not fit") if plan.kind == "measured" else ("fits", "does not fit")
    series = [Series(name="peak", role="ran", look="line", x=tuple(line), y=tuple(line.values()))]
    if least:
        series += [Series(name="least budget", role="muted", look="dashed", x=tuple(least), y=tuple(least.values()))]
    # A trial that ran out of memory held less than the limit, so its peak would look as if it fitted.
    failed_at = 1.03 * plan.limit_bytes if limit.drawn else 1.2 * most
    looks: dict[Outcome, tuple[str, Look, str]] = {
        "ok": (ran, "dot", "ran"),
        "tight": ("tight", "ring", "ran"),
        "oom": (failed, "cross", "limit"),
    }
    for outcome, (name, look, role) in looks.items():
        sizes = [size for size, one in tried.items() if one.outcome == outcome and (outcome == "oom" or size in peaks)]
        if sizes:
            at = tuple(failed_at if outcome == "oom" else peaks[size] for size in sizes)
            texts = tuple(_trial_words(tried[size]) for size in sizes)
            series += [Series(name=name, role=role, look=look, x=tuple(sizes), y=at, texts=texts)]
    chosen = Rule(name=f"micro-batch {plan.micro_batch}", role="ink", axis="x", value=plan.micro_batch, dashed=True)
    return Chart(
        name="the peak over the micro-batch",
        x=Axis("micro-batch, in samples", whole=True),
        y=Axis("memory", "bytes", zero=True),
        series=tuple(series),
        range=(0, 1.05 * max([plan.micro_batch + 1, *tried, *line])),
        rules=(limit, chosen),
    )


def throughput_blocks(known: Throughput) -> tuple[Block, ...]:
    """Return a chart of samples per second, with their quartiles or band and the knee, and its table."""
    lower, upper, middle_name, dots = ("quartile, lower", "quartile, upper", "median", "timed")
    if known.kind == "estimated":
        lower, upper, middle_name, dots = ("band, lower end", "band, upper end", "estimate", "estimated")
    timed = [speed for speed in known.speeds if speed.samples_per_second is not None]
    sizes = tuple(speed.micro_batch for speed in timed)
    middles = tuple(speed.samples_per_second or 0.0 for speed in timed)
    ends = {
        lower: tuple(speed.low or middle for speed, middle in zip(timed, middles, strict=True)),
        upper: tuple(speed.high or middle for speed, middle in zip(timed, middles, strict=True)),
    }
    series = [Series(name=name, role="muted", look="dashed", x=sizes, y=end) for name, end in ends.items()]
    chart = Chart(
        name="samples per second over the micro-batch",
        x=Axis("micro-batch, in samples", whole=True),
        y=Axis("samples per second", zero=True),
        series=(
            *series,
            Series(name=middle_name, role="ran", look="line", x=sizes, y=middles),
            Series(name=dots, role="ran", look="dot", x=sizes, y=middles, entry=""),
        ),
        range=(0, 1.05 * max(sizes)),
        rules=(Rule(name=f"knee at {known.knee}", role="room", axis="x", value=known.knee, dashed=True),),
    )
    return chart, *_table(speeds_table(known))


def purpose_legend(categories: Sequence[Category]) -> Legend:
    """Return a legend of categories."""
    return tuple(("area", one, label(one)) for one in CATEGORIES if one in categories)


def purpose_pieces(categories: Mapping[Category, int]) -> tuple[Piece, ...]:
    """Return the pieces of a bar, one for each category."""
    return tuple(Piece(held, one, f"{label(one)}: {format_bytes(held)}") for one, held in categories.items() if held)


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
        each = "" if share.bytes_per_sample is None else f"{format_bytes(share.bytes_per_sample)} per sample"
        count = f"{share.count} x {share.kind}" if share.kind and share.count > 1 else share.kind
        about = ", ".join(filter(None, (count, each)))
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


def _limit(plan: Plan, most_bytes: int) -> Rule:
    far = is_far(plan.limit_bytes, most_bytes)
    said = f"limit{', far above' if far else ''}: {format_bytes(plan.limit_bytes)}"
    return Rule(name=said, role="limit", axis="y", value=plan.limit_bytes, drawn=not far)


def _entry(explanation: Explanation, category: Category) -> str:
    held = explanation.categories.get(category, 0)
    return f"{label(category)}: {format_bytes(held)}" if held >= LEAST_SHARE * explanation.peak_bytes else ""


def _trial_words(trial: Trial) -> str:
    if trial.outcome == "oom":
        return f"in {trial.phase}" if trial.phase else "out of memory"
    return f"{trial.outcome}, {format_bytes(trial.peak_reserved_bytes or 0)}"


def plain_facts(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts that are a word or a number."""
    for name, value in facts.items():
        if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
            yield name.replace("_", " "), f"{value:,}" if name.startswith("parameter") else str(value)
