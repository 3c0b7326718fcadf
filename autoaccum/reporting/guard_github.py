"""A guard's report for GitHub: annotations at the workloads, and the summary of a step of Actions.

The runner takes commands from both streams of a step (`ActionCommand.cs` of actions/runner): lines that begin with `::`
after spaces, and `##[` anywhere in a line. So the output and names of a workload are escaped before they reach the log.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.text import Text

from autoaccum.errors import AutoaccumError
from autoaccum.guarding.cases import case_name
from autoaccum.guarding.guard_result import Report
from autoaccum.reporting.console import one_line
from autoaccum.reporting.guard_report import OUTCOMES, describe_counts, report_text
from autoaccum.workload.module_names import split_reference

_TITLE = "autoaccum guard"
_OLD_COMMAND = "##["


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
