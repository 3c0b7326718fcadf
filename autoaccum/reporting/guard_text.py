"""What a guard found, as text: a block for each case, and a last line that sums up."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.judgements import Growth, Judgement, Outcome, Report
from autoaccum.guarding.records import Measurement
from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.guard_figures import figures, largest_words, outcome_counts
from autoaccum.reporting.plain_text import one_line
from autoaccum.reporting.rows import row_lines
from autoaccum.units import precise_bytes, signed_bytes

LABELS: dict[Outcome, str] = {
    "unchanged": "unchanged",
    "within": "within tolerance",
    "regressed": "regressed",
    "improved": "improved",
    "too_large": "too large",
    "unmeasured": "not measured",
    "locked": "locked",
}
"""What a person reads for an outcome."""
STYLES: dict[Outcome, str] = {
    "unchanged": "bold green",
    "within": "bold green",
    "regressed": "bold red",
    "improved": "bold cyan",
    "too_large": "bold red",
    "unmeasured": "bold yellow",
    "locked": "bold cyan",
}
_MOST_GROWTHS = 10
_FILE_WIDTH = 120
_COLUMN, _FIRST = 12, 12


def print_report(console: Console, report: Report) -> None:
    """Draw a report: what is well in two lines, what is not with all that is known."""
    for number, judgement in enumerate(report.judgements):
        if number:
            console.print()
        for line in judgement_lines(console, judgement):
            _print(console, line)
    if report.judgements:
        console.print()
    _print(console, summary(report))


def report_text(report: Report) -> str:
    """The same for a file or a log: no colours, lines as wide as most screens."""
    text = io.StringIO()
    print_report(make_console(file=text, width=_FILE_WIDTH, no_color=True, force_terminal=False), report)
    return text.getvalue()


def summary(report: Report) -> Text:
    """One line: how many cases, what they came to, what they were compared with, and what was written."""
    counts = outcome_counts(report)
    number = len(report.judgements)
    line = Text(f"{number} {'case' if number == 1 else 'cases'}: ")
    for place, (outcome, count) in enumerate(counts.items()):
        line.append(", " if place else "")
        line.append(f"{count} {LABELS[outcome]}", STYLES[outcome])
    if not counts:
        line.append("nothing was measured", STYLES["unmeasured"])
    return line.append(f"; {compared(report)}")


def compared(report: Report) -> str:
    """What the cases were compared with, or where they were written."""
    if report.updated is not None:
        return f"written to {report.updated}"
    return f"against {report.against}, tolerance {report.tolerance}"


def judgement_lines(console: Console, judgement: Judgement) -> Iterator[Text]:
    """One case: its outcome, the figures, and where it is not well what grew, why, and the way out."""
    yield Text.assemble(
        (LABELS[judgement.outcome], STYLES[judgement.outcome]), ": ", (case_name(judgement.case), "bold")
    )
    if judgement.traceback:
        yield from (Text(f"  {line}") for line in judgement.traceback.rstrip().splitlines())
    if judgement.explanation:
        yield Text(f"  {judgement.explanation}")
    if judgement.before is not None and judgement.now is not None and judgement.outcome in ("regressed", "improved"):
        yield from figure_lines(judgement)
        if judgement.outcome == "regressed":
            yield from growth_lines(judgement.growths)
    elif judgement.now is not None:
        yield Text(f"  {measured_words(judgement.now)}")
    for title, text in _remarks(judgement):
        yield from row_lines(console, title, text)
    yield from _hint_lines(console, judgement)


def measured_words(now: Measurement) -> str:
    """What was measured, in one line."""
    words = [f"peak {precise_bytes(now.peak_bytes)}"]
    if now.runs:
        words[0] += f" (median of {len(now.runs)} runs, {precise_bytes(now.spread_bytes)} apart)"
    if now.least_bytes is not None:
        words.append(f"least budget {precise_bytes(now.least_bytes)}")
    words.append(f"largest fit {largest_words(now)}")
    words.append(f"parts {format_parts(now.micro_batches)}")
    return ", ".join(words)


def figure_lines(judgement: Judgement) -> Iterator[Text]:
    """Figures before and now, side by side."""
    yield Text(f"  {'':<{_FIRST}}{'before':>{_COLUMN}}{'now':>{_COLUMN}}{'change':>{_COLUMN}}", "dim")
    for figure in figures(judgement):
        cells = f"{figure.before:>{_COLUMN}}{figure.now:>{_COLUMN}}{figure.change:>{_COLUMN}}"
        yield Text(f"  {figure.name:<{_FIRST}}{cells}  {figure.share}".rstrip(), "red" if figure.worse else "")


def growth_lines(growths: Sequence[Growth]) -> Iterator[Text]:
    """What grew and shrank, the most first."""
    if not growths:
        return
    yield Text(f"  {'change':>{_COLUMN}}  for what", "dim")
    for growth in growths[:_MOST_GROWTHS]:
        change = f" ({growth.change})" if growth.change else ""
        yield Text(f"  {signed_bytes(growth.bytes):>{_COLUMN}}  {growth_words(growth)}{change}")
    rest = growths[_MOST_GROWTHS:]
    if rest:
        yield Text(f"  {signed_bytes(sum(growth.bytes for growth in rest)):>{_COLUMN}}  {len(rest)} more", "dim")


def growth_words(growth: Growth) -> str:
    """What a growth is of.

    >>> growth_words(Growth(category="optimizer_state", module="blocks.*.mlp", bytes=1))
    'optimizer state of blocks.*.mlp'
    """
    return f"{growth.category.replace('_', ' ')}{f' of {growth.module}' if growth.module else ''}"


def _remarks(judgement: Judgement) -> Iterator[tuple[str, Text]]:
    for reason in judgement.reasons:
        yield "  why", Text(reason)
    for warning in judgement.warnings:
        yield "  warning", Text(warning, "yellow")
    for note in judgement.notes:
        yield "  note", Text(note)


def _hint_lines(console: Console, judgement: Judgement) -> Iterator[Text]:
    """The way out; its command has a line of its own, which is never wrapped, so that it can be copied."""
    if judgement.hint:
        words = f"{judgement.hint}:" if judgement.command else judgement.hint
        yield from row_lines(console, hint_title(judgement, "  "), Text(words))
    if judgement.command:
        yield Text(f"    {judgement.command}", "cyan")


def hint_title(judgement: Judgement, indent: str = "") -> str:
    """What a hint is."""
    return f"{indent}{'way out' if judgement.exit_code else 'next'}"


def _print(console: Console, line: Text) -> None:
    line.plain = one_line(line.plain)
    line.rstrip()
    console.print(line, soft_wrap=True)
