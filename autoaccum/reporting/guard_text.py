"""What a guard found, as text: a line for each case as it comes, a block for each, and a last line that sums up."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.guarding.cases import Case, case_name
from autoaccum.guarding.records import (
    CaseFinished,
    CaseStarted,
    CheckedOut,
    Event,
    Growth,
    Judgement,
    Measurement,
    Outcome,
    Report,
)
from autoaccum.reporting.consoles import PlainConsole, make_console
from autoaccum.reporting.plain_text import one_line
from autoaccum.reporting.progress import Progress
from autoaccum.reporting.rows import row_lines
from autoaccum.units import percent, precise_bytes, signed_bytes

NONE = "-"
OUTCOMES: dict[Outcome, tuple[str, str]] = {
    "regressed": ("regressed", "bold red"),
    "too_large": ("too large", "bold red"),
    "unmeasured": ("not measured", "bold yellow"),
    "improved": ("improved", "bold cyan"),
    "within": ("within tolerance", "bold green"),
    "unchanged": ("unchanged", "bold green"),
    "locked": ("locked", "bold cyan"),
}
"""What a person reads for an outcome, and its style; the worst first."""

_MOST_GROWTHS = 10
_FILE_WIDTH = 120
_COLUMN = 12
_LABEL_WIDTH = max(len(label) for label, _ in OUTCOMES.values())


class GuardProgress(Progress):
    """Draws events: one line for each case with its time, and a live one for those under way.

    Args:
        console: Where to, stderr as a rule.
        harmless: Makes what a workload prints and is called safe for where it is shown; None: shown as it is.
        options: As in `Progress`.
    """

    def __init__(self, console: PlainConsole, *, harmless: Callable[[str], str] | None = None, **options: Any) -> None:
        super().__init__(console, **options)
        self._harmless = harmless
        self._began: dict[Case, float] = {}

    def tell(self, event: Event) -> None:
        """Draw one event."""
        if isinstance(event, CheckedOut):
            self.show(f"measuring revision {event.revision} beside it ...")
        elif isinstance(event, CaseStarted):
            self._began.setdefault(event.case, time.monotonic())
            self._show_under_way()
        elif isinstance(event, CaseFinished):
            self.stop()
            ended = time.monotonic()
            seconds = ended - self._began.pop(event.judgement.case, ended)
            line = finished_line(event.judgement, event.number, event.count, seconds)
            line.plain = line.plain if self._harmless is None else self._harmless(line.plain)
            self.say(line)
            self._show_under_way()

    def pass_on(self, line: str) -> None:
        """Print what a workload printed, also where it is quiet."""
        super().pass_on(line if self._harmless is None else self._harmless(line))

    def _show_under_way(self) -> None:
        if self._began:
            first, *others = map(case_name, self._began)
            self.show(f"measuring {first}{f' and {len(others)} beside it' if others else ''} ...")


def finished_line(judgement: Judgement, number: int, count: int, seconds: float) -> Text:
    """One case on one line: which of how many, its time, what it came to, its name, and how its peak changed."""
    label, style = OUTCOMES[judgement.outcome]
    line = Text(f"{number:>{len(str(count))}}/{count} {seconds:>6.1f} s  ", "dim")
    whole = Text.assemble(line, (f"{label:<{_LABEL_WIDTH}}", style))
    whole.append(f"  {one_line(case_name(judgement.case))}")
    grown = judgement.growth_bytes
    if grown and judgement.before is not None and judgement.outcome != "unmeasured":
        whole.append(f"  {signed_bytes(grown)} ({percent(grown, judgement.before.peak_bytes, sign=True)})", "dim")
    return whole


def print_report(console: Console, report: Report) -> None:
    """Draw a report: what is well in two lines, what is not with all that is known."""
    for judgement in report.judgements:
        for line in _judgement_lines(console, judgement):
            line.plain = one_line(line.plain)
            line.rstrip()
            console.print(line, soft_wrap=True)
        console.print()
    number = len(report.judgements)
    line = Text(f"{number} {'case' if number == 1 else 'cases'}: ")
    for place, (outcome, count) in enumerate(outcome_counts(report).items()):
        label, style = OUTCOMES[outcome]
        line.append(", " if place else "").append(f"{count} {label}", style)
    console.print(line.append(f"; {compared(report)}"), soft_wrap=True)


def report_text(report: Report) -> str:
    """The same for a file or a log: no colours, lines as wide as most screens."""
    text = io.StringIO()
    print_report(make_console(file=text, width=_FILE_WIDTH, no_color=True, force_terminal=False), report)
    return text.getvalue()


def outcome_counts(report: Report) -> dict[Outcome, int]:
    """How many cases came to what, the worst first."""
    counts = Counter(judgement.outcome for judgement in report.judgements)
    return {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]}


def compared(report: Report) -> str:
    """What the cases were compared with, or where they were written."""
    if report.updated is not None:
        return f"written to {report.updated}"
    return f"against {report.against}, tolerance {report.tolerance}"


@dataclass(frozen=True)
class FigureWords:
    """One quantity before and now, as text; `worse` where it went the wrong way."""

    name: str
    before: str
    now: str
    change: str
    share: str
    worse: bool


def figures(judgement: Judgement) -> Iterator[FigureWords]:
    """What was measured before and now; nothing where it was not measured twice, or is not to be compared."""
    before, now = judgement.before, judgement.now
    if before is None or now is None or judgement.outcome == "unmeasured":
        return
    yield _bytes("peak", before.peak_bytes, now.peak_bytes)
    if before.held_bytes is not None and now.held_bytes is not None:
        yield _bytes("most held", before.held_bytes, now.held_bytes)
    if before.least_bytes is not None or now.least_bytes is not None:
        yield _bytes("least budget", before.least_bytes, now.least_bytes)
    change = now.largest - before.largest
    yield FigureWords(
        "largest fit", largest_words(before), largest_words(now), f"{change:+d}" if change else NONE, "", change < 0
    )


def largest_words(measurement: Measurement) -> str:
    """The largest micro-batch that fits; `(all)` where an update has no more samples, and no larger one was sought."""
    if measurement.largest == 0:
        return "none"
    return f"{measurement.largest} (all)" if measurement.capped else str(measurement.largest)


def growth_words(growth: Growth) -> str:
    """What a growth is of.

    >>> growth_words(Growth(category="optimizer_state", module="blocks.*.mlp", bytes=1))
    'optimizer state of blocks.*.mlp'
    """
    return f"{growth.category.replace('_', ' ')}{f' of {growth.module}' if growth.module else ''}"


def remarks(judgement: Judgement) -> Iterator[tuple[str, str]]:
    """What else is told of a case, each with its kind."""
    yield from (("why", reason) for reason in judgement.reasons)
    yield from (("warning", warning) for warning in judgement.warnings)
    yield from (("note", note) for note in judgement.notes)


def hint_title(judgement: Judgement) -> str:
    """What a hint is."""
    return "way out" if judgement.exit_code else "next"


def _bytes(name: str, before: int | None, now: int | None) -> FigureWords:
    was, is_now = (NONE if one is None else precise_bytes(one) for one in (before, now))
    if before is None or now is None or before == now:
        return FigureWords(name, was, is_now, NONE, "", False)
    grown = now - before
    return FigureWords(name, was, is_now, signed_bytes(grown), percent(grown, before, sign=True), grown > 0)


def _judgement_lines(console: Console, judgement: Judgement) -> Iterator[Text]:
    """One case: its outcome, the figures, and where it is not well what grew, why, and the way out."""
    yield Text.assemble(OUTCOMES[judgement.outcome], ": ", (case_name(judgement.case), "bold"))
    yield from (Text(f"  {line}") for line in (judgement.traceback or "").rstrip().splitlines())
    if judgement.explanation:
        yield Text(f"  {judgement.explanation}")
    if judgement.before is not None and judgement.outcome in ("regressed", "improved"):
        yield from _figure_lines(judgement)
    elif judgement.now is not None:
        yield Text(f"  {_measured_words(judgement.now)}")
    if judgement.outcome == "regressed":
        yield from _growth_lines(judgement)
    for kind, text in remarks(judgement):
        yield from row_lines(console, f"  {kind}", Text(text, "yellow" if kind == "warning" else ""))
    if judgement.hint:
        words = f"{judgement.hint}:" if judgement.command else judgement.hint
        yield from row_lines(console, f"  {hint_title(judgement)}", Text(words))
    if judgement.command:  # On a line of its own, which is never wrapped, so that it can be copied.
        yield Text(f"    {judgement.command}", "cyan")


def _measured_words(now: Measurement) -> str:
    """What was measured, in one line."""
    words = [f"peak {precise_bytes(now.peak_bytes)}"]
    if now.runs:
        words[0] += f" (median of {len(now.runs)} runs, {precise_bytes(now.spread_bytes)} apart)"
    if now.least_bytes is not None:
        words.append(f"least budget {precise_bytes(now.least_bytes)}")
    return ", ".join([*words, f"largest fit {largest_words(now)}", f"parts {format_parts(now.micro_batches)}"])


def _figure_lines(judgement: Judgement) -> Iterator[Text]:
    """Figures before and now, side by side."""
    yield Text(f"  {'':<{_COLUMN}}{'before':>{_COLUMN}}{'now':>{_COLUMN}}{'change':>{_COLUMN}}", "dim")
    for figure in figures(judgement):
        cells = f"{figure.before:>{_COLUMN}}{figure.now:>{_COLUMN}}{figure.change:>{_COLUMN}}"
        yield Text(f"  {figure.name:<{_COLUMN}}{cells}  {figure.share}", "red" if figure.worse else "")


def _growth_lines(judgement: Judgement) -> Iterator[Text]:
    """What grew and shrank, the most first."""
    if judgement.growths:
        yield Text(f"  {'change':>{_COLUMN}}  for what", "dim")
    for growth in judgement.growths[:_MOST_GROWTHS]:
        change = f" ({growth.change})" if growth.change else ""
        yield Text(f"  {signed_bytes(growth.bytes):>{_COLUMN}}  {growth_words(growth)}{change}")
    if rest := judgement.growths[_MOST_GROWTHS:]:
        yield Text(f"  {signed_bytes(sum(growth.bytes for growth in rest)):>{_COLUMN}}  {len(rest)} more", "dim")
