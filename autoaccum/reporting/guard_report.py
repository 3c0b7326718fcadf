"""Show a guard's report: progress lines, text, and for GitHub annotations and the summary of a step.

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

from rich.text import Text

from autoaccum.checks import counted
from autoaccum.errors import AutoaccumError
from autoaccum.guarding.cases import case_name
from autoaccum.guarding.guard_result import CaseFinished, CaseStarted, Event, Measurement, Outcome, Report, Verdict
from autoaccum.messages import Message, message
from autoaccum.reporting.console import Block, Facts, PlainConsole, Table, make_console, one_line, show
from autoaccum.reporting.progress import Progress
from autoaccum.sentences import name_memory
from autoaccum.sources.source import FileSource
from autoaccum.units import format_parts, percent, precise_bytes, signed_bytes

OUTCOMES: dict[Outcome, tuple[str, str]] = {
    "regressed": ("regressed", "bold red"),
    "unmeasured": ("not measured", "bold yellow"),
    "passed": ("passed", "bold green"),
    "locked": ("locked", "bold cyan"),
}
"""The label of each outcome, and its style; the worst outcome first."""
_SIZES = {"peak": "peak", "held": "most held", "min_budget": "smallest budget", "tokens": "held by tokens"}
"""The labels of what is compared."""

TITLE = "autoaccum guard"
_OLD_COMMAND = "##["
_MOST_GROWTHS = 10
_FILE_WIDTH = 120
_LABEL_WIDTH = max(len(label) for label, _ in OUTCOMES.values())


class GuardProgress(Progress):
    """Shows a guard's progress: one line for each finished case, and a live line for the current one.

    `harmless` makes a workload's output and names safe for the place where they are shown.
    """

    def __init__(self, console: PlainConsole, *, harmless: Callable[[str], str] | None = None, **options: Any) -> None:
        super().__init__(console, **options)
        self._harmless = harmless or str
        self._began = 0.0

    def notify(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, CaseStarted):
            self._began = time.monotonic()
            self.show(f"measuring {case_name(event.case)} ...")
        elif isinstance(event, CaseFinished):
            self.stop()
            line = _finished_line(event, time.monotonic() - self._began)
            line.plain = self._harmless(line.plain)
            self.say(line)

    def print_output(self, line: str) -> None:
        """Print what a workload printed, even if quiet."""
        super().print_output(self._harmless(line))


def _finished_line(event: CaseFinished, seconds: float) -> Text:
    """Return one line for a case: its number, time, outcome, name, and the change of its peak."""
    verdict, width, change = event.verdict, len(str(event.count)), ""
    label, style = OUTCOMES[verdict.outcome]
    if verdict.growth_bytes and verdict.before is not None and verdict.outcome != "unmeasured":
        share = percent(verdict.growth_bytes, verdict.before.peak_bytes, sign=True)
        change = f"  {signed_bytes(verdict.growth_bytes)} ({share})"
    return Text.assemble(
        (f"{event.number:>{width}}/{event.count} {seconds:>6.1f} s  ", "dim"),
        (f"{label:<{_LABEL_WIDTH}}", style),
        f"  {one_line(case_name(verdict.case))}",
        (change, "dim"),
    )


def report_blocks(report: Report) -> Iterator[Block]:
    """Yield what a report shows: two lines for a case that passes, all details for one that does not."""
    for verdict in report.verdicts:
        yield from _verdict_blocks(verdict)
        yield ""
    counts = [part for count, label in _counts(report) for part in (", ", (f"{count} {label[0]}", label[1]))]
    against = f"against {report.against}, tolerance {report.tolerance}"
    where = against if report.updated is None else f"written to {report.updated}"
    yield Text.assemble(f"{counted(len(report.verdicts), 'case')}: ", *counts[1:], f"; {where}")


def report_text(report: Report) -> str:
    """Return the report as text for a file or a log, without colours."""
    text = io.StringIO()
    show(make_console(file=text, width=_FILE_WIDTH, no_color=True, force_terminal=False), *report_blocks(report))
    return text.getvalue()


def _counts(report: Report) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield how many cases have which outcome, with its label and style, the worst first."""
    counts = Counter(verdict.outcome for verdict in report.verdicts)
    yield from ((counts[outcome], label) for outcome, label in OUTCOMES.items() if counts[outcome])


def describe_counts(report: Report) -> str:
    """Write how many cases have which outcome, the worst first."""
    return ", ".join(f"{count} {label}" for count, (label, _) in _counts(report)) or "no cases"


def _verdict_blocks(verdict: Verdict) -> Iterator[Block]:
    """Yield a case: outcome and numbers; if it does not pass, also what grew, why, and what to do."""
    yield Text.assemble(OUTCOMES[verdict.outcome], ": ", (case_name(verdict.case), "bold"))
    yield from (Text(f"  {line}") for line in (verdict.traceback or "").rstrip().splitlines())
    if verdict.explanation:
        yield Text(f"  {_explanation(verdict)}")
    before, now = verdict.before, verdict.now
    if before is not None and now is not None and verdict.outcome == "regressed":
        yield _figures(before, now)
        if verdict.growths:
            yield _growths(verdict)
    elif now is not None:
        sizes = f"peak {precise_bytes(now.peak_bytes)}, smallest budget {precise_bytes(now.min_budget_bytes)}"
        tokens = "" if now.micro_tokens is None else f", micro_tokens {now.micro_tokens:,}"
        yield Text(f"  {sizes}, largest fit {_largest(now)}, parts {format_parts(now.micro_batches)}{tokens}")
    rows: list[tuple[str, str | Text]] = [("  why", str(reason)) for reason in verdict.reasons]
    rows += [(f"  {kind}", text) for kind, text in Facts.of_messages(verdict.warnings, ()).rows]
    if verdict.hint is not None:
        rows.append(("  way out", f"{verdict.hint}{':' if verdict.command else ''}"))
    yield Facts(rows)
    if verdict.command:
        yield Text(f"    {verdict.command}", "cyan")


def _explanation(verdict: Verdict) -> str:
    return "; ".join(map(str, verdict.explanation))


def _largest(measurement: Measurement) -> str:
    """Write the largest micro-batch that fits; `at least` where it was not memory that ended the search."""
    if measurement.largest == 0:
        return "none"
    return f"at least {measurement.largest}" if measurement.capped else str(measurement.largest)


def _figures(before: Measurement, now: Measurement) -> Table:
    """List the numbers before and now, red where they got worse."""
    table = Table("", ">before", ">now", ">change", "")
    for name, size in now.sizes.items():
        growth = size - before.sizes[name]
        change = (signed_bytes(growth), percent(growth, size - growth, sign=True)) if growth else ("-", "")
        cells = (f"  {_SIZES[name]}", precise_bytes(size - growth), precise_bytes(size))
        table.add(*cells, *change, style="red" if growth > 0 else "")
    growth = now.largest - before.largest
    cells = ("  largest fit", _largest(before), _largest(now))
    table.add(*cells, f"{growth:+d}" if growth else "-", "", style="red" if growth < 0 else "")
    return table


def _growths(verdict: Verdict) -> Table:
    table = Table(">  change", "for what")
    for growth in verdict.growths[:_MOST_GROWTHS]:
        change = f" ({growth.change})" if growth.change else ""
        table.add(f"  {signed_bytes(growth.bytes)}", f"{name_memory(growth.category, growth.module)}{change}")
    if rest := verdict.growths[_MOST_GROWTHS:]:
        table.add(signed_bytes(sum(growth.bytes for growth in rest)), f"{len(rest)} more", style="dim")
    return table


def report_markdown(report: Report) -> str:
    """Return the report as markdown, for a step summary: the text, which nothing in it can end."""
    return _markdown(describe_counts(report), report_text(report))


def error_markdown(error: AutoaccumError) -> str:
    """Return an error as markdown, in place of a report."""
    return _markdown("error", f"{error}\n")


def _markdown(title: str, text: str) -> str:
    return f"### {TITLE}: {title}\n\n<pre>\n{html.escape(text)}</pre>\n"


def write_summary(markdown: str, environment: Mapping[str, str]) -> Message | None:
    """Append markdown to the step's summary, if any; return a warning if it cannot be written."""
    name = environment.get("GITHUB_STEP_SUMMARY")
    try:
        if name:
            with Path(name).open("ab") as file:
                file.write(markdown.encode())
    except (OSError, ValueError) as error:
        return message("summary_not_written", error=str(getattr(error, "strerror", None) or error))
    return None


def annotation_lines(report: Report, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield an annotation for each case to look at, the worst first: GitHub shows ten of a kind."""
    relevant = [verdict for verdict in report.verdicts if verdict.exit_code]
    for verdict in sorted(relevant, key=lambda verdict: list(OUTCOMES).index(verdict.outcome)):
        label, _ = OUTCOMES[verdict.outcome]
        way_out = ": ".join(str(part) for part in (verdict.hint, verdict.command) if part)
        lines = [one_line(str(line)) for line in (_explanation(verdict), *verdict.reasons, way_out) if line]
        title = f"{TITLE}: {label}, {case_name(verdict.case)}"
        yield command("error", "\n".join(lines) or label, **_find_place(verdict, folder, environment), title=title)


def command(name: str, text: str, **properties: str) -> str:
    r"""Return a workflow command, escaped as actions/runner parses it.

    >>> command("error", "50 %\nmore", file="a,b.py", title="x: y")
    '::error file=a%2Cb.py,title=x%3A y::50 %25%0Amore'
    """
    given = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name}{' ' if given else ''}{given}::{_data(text)}"


def harmless(text: str) -> str:
    r"""Change log lines so that neither the runner nor a terminal takes them for commands.

    >>> print(harmless("  ::error::no\rfine: a::b\n##[group]x"))
      : :error::no
    fine: a::b
    ## [group]x
    """
    return "\n".join(map(_harmless_line, re.split(r"\r\n|\r|\n", text)))


def _harmless_line(line: str) -> str:
    shown = one_line(Text.from_ansi(line).plain)
    if shown.lstrip().startswith("::"):
        shown = shown.replace("::", ": :", 1)
    return shown.replace(_OLD_COMMAND, "## [")


def _find_place(verdict: Verdict, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Find the file, from the repository's root, and the line to annotate; empty if they are outside of it.

    It is the line of the module that grew most, or else the one that defines the workload.
    """
    grown = next((growth for growth in verdict.growths if growth.category != "unused"), None)
    module, _, line = (grown.line if grown else "").rpartition(":")
    command = verdict.case.command(folder)
    workload = FileSource(str((*(() if command is None else command.files), verdict.case.workload)[0]))
    root = Path(environment.get("GITHUB_WORKSPACE") or folder).resolve()
    for file, number in ((module, line), (workload.file, None)):
        path = (folder / file).resolve()
        if path.is_file() and path.is_relative_to(root):
            number = number or _find_definition(path, workload.variable)
            return {"file": path.relative_to(root).as_posix(), "line": number}
    return {}


def _find_definition(path: Path, variable: str | None) -> str:
    """Return the number of the line that defines a workload."""
    defined = re.compile(rf"(?:def |class )?{re.escape(variable or '') or '(?:workload|model)'}\b")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return str(next((number for number, text in enumerate(lines, 1) if defined.match(text)), 1))


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(_OLD_COMMAND, "## [")


def _property(text: str) -> str:
    return _data(one_line(text)).replace(":", "%3A").replace(",", "%2C")
