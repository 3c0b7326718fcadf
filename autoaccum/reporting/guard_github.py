"""What a guard found, for GitHub Actions: the log, annotations at the workloads, and the step's summary.

The runner reads commands off both streams of a step (`ActionCommand.cs` of actions/runner): lines that begin with `::`
after spaces, and `##[` anywhere in a line. So nothing that a workload, its modules or its author brings along may
reach the log as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.text import Text

from autoaccum.errors import AutoaccumError
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.judgements import Judgement, Report
from autoaccum.reporting.guard_figures import WORST_FIRST
from autoaccum.reporting.guard_markdown import report_markdown
from autoaccum.reporting.guard_text import LABELS
from autoaccum.reporting.plain_text import one_line
from autoaccum.reporting.source_place import find_place

_TITLE = "autoaccum guard"
_MOST_SUMMARY_BYTES = 1024 * 1024
"""Of one step, by GitHub's documentation of job summaries; a larger one is not shown at all."""
_OLD_COMMAND = "##["


def harmless(text: str) -> str:
    r"""Lines of a log that the runner takes for no command, and a terminal for none either.

    >>> print(harmless("  ::error::no\rfine: a::b\n##[group]x"))
      : :error::no
    fine: a::b
    ## [group]x
    """
    return "\n".join(map(_harmless_line, re.split(r"\r\n|\r|\n", text)))


def annotation_lines(report: Report, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """A command for each case that a person should look at, the worst first: GitHub shows ten of a kind.

    Args:
        report: What was found.
        folder: The project's, which workloads are relative to.
        environment: Of the runner.
    """
    told = [one for one in report.judgements if one.exit_code or one.outcome == "improved"]
    for judgement in sorted(told, key=lambda one: WORST_FIRST.index(one.outcome)):
        place = find_place(judgement.case.workload, folder, environment)
        where = {} if place is None else {"file": place.file, "line": str(place.line)}
        title = f"{_TITLE}: {LABELS[judgement.outcome]}, {case_name(judgement.case)}"
        yield command("error" if judgement.exit_code else "notice", _message(judgement), **where, title=title)


def error_annotation(error: AutoaccumError) -> str:
    """The command for what ended a guard before there was a report."""
    return command("error", str(error), title=_TITLE)


def command(name: str, message: str, **properties: str) -> str:
    r"""A workflow command, with what it carries escaped as actions/runner takes it apart.

    >>> command("error", "50 %\nmore", file="a,b.py", title="x: y")
    '::error file=a%2Cb.py,title=x%3A y::50 %25%0Amore'
    """
    given = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name}{' ' if given else ''}{given}::{_data(message)}"


def write_summary(report: Report, environment: Mapping[str, str]) -> str | None:
    """Append the report to the step's summary, where there is one.

    Returns:
        What was in the way, which is no fault of the guard's; None: nothing.
    """
    name = environment.get("GITHUB_STEP_SUMMARY")
    if not name:
        return None
    path = Path(name)
    try:
        room = _MOST_SUMMARY_BYTES - (path.stat().st_size if path.exists() else 0)
        forms = (report_markdown(report, details=details).encode() for details in (True, False))
        written = next((form for form in forms if len(form) <= room), None)
        if written is None:
            return f"the step's summary has no room for the report (GitHub shows {_MOST_SUMMARY_BYTES:,} bytes of it)"
        with path.open("ab") as file:
            file.write(written)
    except (OSError, ValueError) as error:
        return f"the step's summary cannot be written ({getattr(error, 'strerror', None) or error})"
    return None


def _message(judgement: Judgement) -> str:
    way_out = ": ".join(filter(None, (judgement.hint, judgement.command)))
    lines = [judgement.explanation, *judgement.reasons, way_out]
    return "\n".join(one_line(line) for line in lines if line) or LABELS[judgement.outcome]


def _harmless_line(line: str) -> str:
    shown = one_line(Text.from_ansi(line).plain)
    if shown.lstrip().startswith("::"):
        shown = shown.replace("::", ": :", 1)
    return shown.replace(_OLD_COMMAND, "## [")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(_OLD_COMMAND, "## [")


def _property(text: str) -> str:
    return _data(one_line(text)).replace(":", "%3A").replace(",", "%2C")
