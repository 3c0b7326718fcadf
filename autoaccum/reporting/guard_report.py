"""Show a guard's report: progress lines, text, a page, and for GitHub annotations and the summary of a step.

The runner takes commands from both streams of a step (`ActionCommand.cs` of actions/runner): lines that begin with `::`
after spaces, and `##[` anywhere in a line. So the output and names of a workload are escaped before they reach the log.
"""

from __future__ import annotations

import html
import io
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.errors import AutoaccumError
from autoaccum.guarding.cases import case_name
from autoaccum.guarding.guard_result import (
    CaseFinished,
    CaseStarted,
    CheckedOut,
    Event,
    Measurement,
    Outcome,
    Report,
    Verdict,
)
from autoaccum.reporting.console import PlainConsole, make_console, one_line, row_lines
from autoaccum.reporting.page import Page, report_page
from autoaccum.reporting.progress import Progress
from autoaccum.sources.module_names import split_reference
from autoaccum.units import percent, precise_bytes, signed_bytes

NONE = "-"
OUTCOMES: dict[Outcome, tuple[str, str]] = {
    "regressed": ("regressed", "bold red"),
    "unmeasured": ("not measured", "bold yellow"),
    "improved": ("improved", "bold cyan"),
    "within": ("within tolerance", "bold green"),
    "unchanged": ("unchanged", "bold green"),
    "locked": ("locked", "bold cyan"),
}
"""The label of each outcome, and its style; the worst outcome first."""

_TITLE = "autoaccum guard"
_OLD_COMMAND = "##["
_MOST_GROWTHS = 10
_FILE_WIDTH = 120
_COLUMN = 12
_LABEL_WIDTH = max(len(label) for label, _ in OUTCOMES.values())


class GuardProgress(Progress):
    """Shows a guard's progress: one line for each finished case, and a live line for the current one.

    `harmless` makes a workload's output and names safe for the place where they are shown.
    """

    def __init__(self, console: PlainConsole, *, harmless: Callable[[str], str] | None = None, **options: Any) -> None:
        super().__init__(console, **options)
        self._harmless = harmless
        self._began = 0.0

    def notify(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, CheckedOut):
            self.show(f"measuring revision {event.revision} as well ...")
        elif isinstance(event, CaseStarted):
            self._began = time.monotonic()
            self.show(f"measuring {case_name(event.case)} ...")
        elif isinstance(event, CaseFinished):
            self.stop()
            line = finished_line(event.verdict, event.number, event.count, time.monotonic() - self._began)
            line.plain = line.plain if self._harmless is None else self._harmless(line.plain)
            self.say(line)

    def print_output(self, line: str) -> None:
        """Print what a workload printed, even if quiet."""
        super().print_output(line if self._harmless is None else self._harmless(line))


def finished_line(verdict: Verdict, number: int, count: int, seconds: float) -> Text:
    """Return one line for a case: its number, time, outcome, name, and the change of its peak."""
    label, style = OUTCOMES[verdict.outcome]
    line = Text(f"{number:>{len(str(count))}}/{count} {seconds:>6.1f} s  ", "dim")
    whole = Text.assemble(line, (f"{label:<{_LABEL_WIDTH}}", style))
    whole.append(f"  {one_line(case_name(verdict.case))}")
    grown = verdict.growth_bytes
    if grown and verdict.before is not None and verdict.outcome != "unmeasured":
        whole.append(f"  {signed_bytes(grown)} ({percent(grown, verdict.before.peak_bytes, sign=True)})", "dim")
    return whole


def print_report(console: Console, report: Report) -> None:
    """Print a report: two lines for a case that passes, all details for one that does not."""
    for verdict in report.verdicts:
        for line in _verdict_lines(console, verdict):
            line.plain = one_line(line.plain)
            line.rstrip()
            console.print(line, soft_wrap=True)
        console.print()
    number = len(report.verdicts)
    line = Text(f"{number} {'case' if number == 1 else 'cases'}: ")
    for place, (outcome, count) in enumerate(outcome_counts(report).items()):
        label, style = OUTCOMES[outcome]
        line.append(", " if place else "").append(f"{count} {label}", style)
    console.print(line.append(f"; {_compared(report)}"), soft_wrap=True)


def report_text(report: Report) -> str:
    """Return the report as text for a file or a log, without colours."""
    text = io.StringIO()
    print_report(make_console(file=text, width=_FILE_WIDTH, no_color=True, force_terminal=False), report)
    return text.getvalue()


def outcome_counts(report: Report) -> dict[Outcome, int]:
    """Count the cases by outcome, the worst first."""
    counts = Counter(verdict.outcome for verdict in report.verdicts)
    return {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]}


def describe_counts(report: Report) -> str:
    """Write how many cases have which outcome, the worst first."""
    counts = outcome_counts(report)
    return ", ".join(f"{count} {OUTCOMES[outcome][0]}" for outcome, count in counts.items()) or "no cases"


def _compared(report: Report) -> str:
    """Say what the cases were compared with, or where they were written."""
    if report.updated is not None:
        return f"written to {report.updated}"
    return f"against {report.against}, tolerance {report.tolerance}"


def _describe_largest(measurement: Measurement) -> str:
    """Write the largest micro-batch that fits; `(all)` where an update has no more samples."""
    if measurement.largest == 0:
        return "none"
    return f"{measurement.largest} (all)" if measurement.capped else str(measurement.largest)


def _labelled_messages(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the reasons, warnings, notes and the hint of a verdict, each with its label."""
    yield from (("why", reason) for reason in verdict.reasons)
    yield from (("warning", warning) for warning in verdict.warnings)
    yield from (("note", note) for note in verdict.notes)
    if verdict.hint:
        yield "way out" if verdict.exit_code else "next", verdict.hint + (":" if verdict.command else "")


def _verdict_lines(console: Console, verdict: Verdict) -> Iterator[Text]:
    """Yield the lines of a case: outcome and numbers; if it does not pass, also what grew, why, and what to do."""
    yield Text.assemble(OUTCOMES[verdict.outcome], ": ", (case_name(verdict.case), "bold"))
    yield from (Text(f"  {line}") for line in (verdict.traceback or "").rstrip().splitlines())
    if verdict.explanation:
        yield Text(f"  {verdict.explanation}")
    if verdict.before is not None and verdict.now is not None and verdict.outcome in ("regressed", "improved"):
        yield from _figure_lines(verdict.before, verdict.now)
    elif verdict.now is not None:
        yield Text(f"  {_describe_measurement(verdict.now)}")
    if verdict.outcome == "regressed":
        yield from _growth_lines(verdict)
    for kind, text in _labelled_messages(verdict):
        yield from row_lines(console, f"  {kind}", Text(text, "yellow" if kind == "warning" else ""))
    if verdict.command:  # On a line of its own, which is never wrapped, so that it can be copied.
        yield Text(f"    {verdict.command}", "cyan")


def _describe_measurement(now: Measurement) -> str:
    """Write a measurement in one line."""
    peak, least = precise_bytes(now.peak_bytes), precise_bytes(now.least_bytes)
    parts = format_parts(now.micro_batches)
    return f"peak {peak}, least budget {least}, largest fit {_describe_largest(now)}, parts {parts}"


def _figure_rows(before: Measurement, now: Measurement) -> Iterator[tuple[tuple[str, str, str, str, str], bool]]:
    """Yield the numbers before and now: name, before, now, change, its percentage; and whether it got worse."""
    rows = [("peak", before.peak_bytes, now.peak_bytes), ("most held", before.held_bytes, now.held_bytes)]
    for name, was, is_now in [*rows, ("least budget", before.least_bytes, now.least_bytes)]:
        change, share = (signed_bytes(is_now - was), percent(is_now - was, was, sign=True))
        cells = (name, precise_bytes(was), precise_bytes(is_now), *((change, share) if is_now != was else (NONE, "")))
        yield cells, is_now > was
    change = f"{now.largest - before.largest:+d}" if now.largest != before.largest else NONE
    cells = ("largest fit", _describe_largest(before), _describe_largest(now), change, "")
    yield cells, now.largest < before.largest


def _figure_lines(before: Measurement, now: Measurement) -> Iterator[Text]:
    """Yield the numbers before and now, red where they got worse."""
    yield Text(f"  {'':<{_COLUMN}}{'before':>{_COLUMN}}{'now':>{_COLUMN}}{'change':>{_COLUMN}}", "dim")
    for (name, was, is_now, change, share), worse in _figure_rows(before, now):
        line = f"  {name:<{_COLUMN}}{was:>{_COLUMN}}{is_now:>{_COLUMN}}{change:>{_COLUMN}}  {share}"
        yield Text(line.rstrip(), "red" if worse else "")


def _growth_lines(verdict: Verdict) -> Iterator[Text]:
    if verdict.growths:
        yield Text(f"  {'change':>{_COLUMN}}  for what", "dim")
    for growth in verdict.growths[:_MOST_GROWTHS]:
        change = f" ({growth.change})" if growth.change else ""
        yield Text(f"  {signed_bytes(growth.bytes):>{_COLUMN}}  {growth.what}{change}")
    if rest := verdict.growths[_MOST_GROWTHS:]:
        yield Text(f"  {signed_bytes(sum(growth.bytes for growth in rest)):>{_COLUMN}}  {len(rest)} more", "dim")


def guard_page(report: Report) -> Page:
    """Return the page of a guard."""
    return report_page("autoaccum guard", describe_counts(report), lambda console: print_report(console, report))


def report_markdown(report: Report) -> str:
    """Return the report as markdown, for a step summary: the text, which nothing in it can end."""
    return f"### {_TITLE}: {describe_counts(report)}\n\n<pre>\n{html.escape(report_text(report))}</pre>\n"


def harmless(text: str) -> str:
    r"""Change log lines so that neither the runner nor a terminal takes them for commands.

    >>> print(harmless("  ::error::no\rfine: a::b\n##[group]x"))
      : :error::no
    fine: a::b
    ## [group]x
    """
    return "\n".join(map(_harmless_line, re.split(r"\r\n|\r|\n", text)))


def annotation_lines(report: Report, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield an annotation for each case to look at, the worst first: GitHub shows ten of a kind."""
    relevant = [one for one in report.verdicts if one.exit_code or one.outcome == "improved"]
    for verdict in sorted(relevant, key=lambda one: list(OUTCOMES).index(one.outcome)):
        where = _find_definition(verdict.case.workload, folder, environment)
        title = f"{_TITLE}: {OUTCOMES[verdict.outcome][0]}, {case_name(verdict.case)}"
        way_out = ": ".join(filter(None, (verdict.hint, verdict.command)))
        lines = [one_line(line) for line in (verdict.explanation, *verdict.reasons, way_out) if line]
        message = "\n".join(lines) or OUTCOMES[verdict.outcome][0]
        yield command("error" if verdict.exit_code else "notice", message, **where, title=title)


def error_annotation(error: AutoaccumError) -> str:
    """Return the annotation for an error that ended a guard before there was a report."""
    return command("error", str(error), title=_TITLE)


def command(name: str, message: str, **properties: str) -> str:
    r"""Return a workflow command, escaped as actions/runner parses it.

    >>> command("error", "50 %\nmore", file="a,b.py", title="x: y")
    '::error file=a%2Cb.py,title=x%3A y::50 %25%0Amore'
    """
    given = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name}{' ' if given else ''}{given}::{_data(message)}"


def write_summary(report: Report, environment: Mapping[str, str]) -> str | None:
    """Append the report to the step's summary, if any; return why it could not be written, which is no failure."""
    name = environment.get("GITHUB_STEP_SUMMARY")
    if not name:
        return None
    path = Path(name)
    try:
        with path.open("ab") as file:
            file.write(report_markdown(report).encode())
    except (OSError, ValueError) as error:
        return f"the step's summary cannot be written ({getattr(error, 'strerror', None) or error})"
    return None


def _find_definition(workload: str, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Find the file, from the repository's root, and the line that define a workload; empty where there is none."""
    target, _, name = split_reference(workload)
    module = target.replace(".", "/")
    files = [target, *(f"{base}{module}{end}" for base in ("", "src/") for end in (".py", "/__init__.py"))]
    path = next((folder / file for file in files if (folder / file).is_file()), None)
    above = [folder.resolve(), *folder.resolve().parents]
    workspace = Path(environment.get("GITHUB_WORKSPACE") or "/").resolve()
    root = workspace if workspace in above[:-1] else next((one for one in above if (one / ".git").exists()), above[0])
    if path is None or not path.resolve().is_relative_to(root):
        return {}
    defined = re.compile(rf"(?:def |class )?{re.escape(name) or '(?:workload|model)'}\b")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if defined.match(text)), 1)
    return {"file": path.resolve().relative_to(root).as_posix(), "line": str(line)}


def _harmless_line(line: str) -> str:
    shown = one_line(Text.from_ansi(line).plain)
    if shown.lstrip().startswith("::"):
        shown = shown.replace("::", ": :", 1)
    return shown.replace(_OLD_COMMAND, "## [")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(_OLD_COMMAND, "## [")


def _property(text: str) -> str:
    return _data(one_line(text)).replace(":", "%3A").replace(",", "%2C")
