"""The page of a guard: for each case the verdict, the difference from the lock, what grew, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from autoaccum.guarding.cases import case_name
from autoaccum.guarding.guard_result import Growth, Measurement, Report, Verdict
from autoaccum.reporting.console import make_table
from autoaccum.reporting.guard_report import (
    OUTCOMES,
    compared,
    describe_measurement,
    figure_rows,
    labelled_messages,
    outcome_counts,
)
from autoaccum.reporting.page.blocks import (
    Bar,
    Bars,
    Block,
    Facts,
    Grid,
    Heading,
    Lines,
    Messages,
    Page,
    Piece,
    Section,
    purpose_legend,
    purpose_pieces,
    tone_of,
)
from autoaccum.units import precise_bytes, signed_bytes


def guard_page(report: Report) -> Page:
    """Return the page of a guard."""
    counts = outcome_counts(report)
    worst_first = sorted(report.verdicts, key=lambda one: list(OUTCOMES).index(one.outcome))
    return Page(
        kind="autoaccum guard",
        title=", ".join(f"{count} {OUTCOMES[outcome][0]}" for outcome, count in counts.items()) or "no cases",
        tiles=[
            (compared(report), str(len(report.verdicts)) + (" case" if len(report.verdicts) == 1 else " cases"), ""),
            *((OUTCOMES[outcome][0], str(count), tone_of(OUTCOMES[outcome][1])) for outcome, count in counts.items()),
        ],
        sections=[Section(case_name(verdict.case), tuple(_blocks(verdict))) for verdict in worst_first],
    )


def _blocks(verdict: Verdict) -> Iterator[Block]:
    """Yield what is known of a case."""
    before, now = verdict.before, verdict.now
    outcome = ": ".join(filter(None, (OUTCOMES[verdict.outcome][0], verdict.explanation)))
    yield Facts((("outcome", outcome),))
    if messages := list(labelled_messages(verdict)):
        yield Messages.of(messages)
    if verdict.command:
        yield Lines((verdict.command,), is_code=True)
    if verdict.traceback:
        yield Lines(tuple(verdict.traceback.rstrip().splitlines()), is_code=True)
    if before is not None and now is not None:
        table = make_table("", ">before", ">now", ">change", "")
        for cells, worse in figure_rows(before, now):
            table.add_row(*cells, style="red" if worse else "")
        yield Grid.of(table)
    elif now is not None:
        yield Lines((describe_measurement(now),))
    yield from _purposes({"before": before, "now": now})
    if verdict.growths:
        yield Heading("What grew, and what shrank")
        yield Bars(tuple(map(_growth, verdict.growths)), max(abs(one.bytes) for one in verdict.growths) or 1)


def _purposes(measured: dict[str, Measurement | None]) -> Iterator[Block]:
    """Yield the bytes at the peak by purpose, before and now."""
    known = {name: one for name, one in measured.items() if one is not None and one.categories}
    if not known:
        return
    yield Heading("At the peak, by purpose")
    bars = [
        Bar(name, purpose_pieces(one.categories), precise_bytes(one.peak_bytes), f"in {one.phase}" if one.phase else "")
        for name, one in known.items()
    ]
    legend = purpose_legend([purpose for one in known.values() for purpose in one.categories])
    yield Bars(tuple(bars), max(sum(one.categories.values()) for one in known.values()), legend)


def _growth(growth: Growth) -> Bar:
    role, bytes_ = "limit" if growth.bytes > 0 else "room", signed_bytes(growth.bytes)
    return Bar(growth.what, (Piece(abs(growth.bytes), role, bytes_),), bytes_, growth.change)
