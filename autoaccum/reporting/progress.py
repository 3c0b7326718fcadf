"""A live line on a terminal with printed lines above it, for every command; planning has a line for each trial."""

from __future__ import annotations

import re
import textwrap
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import progress as rich_progress
from rich.table import Column
from rich.text import Text

from autoaccum.checks import join_words
from autoaccum.devices.base import Trial
from autoaccum.planning.comparison_record import ComparisonRow
from autoaccum.planning.plan_events import (
    Doing,
    Explained,
    Inspected,
    SaversTried,
    TracedAlone,
    TrialFinished,
    TrialStarted,
    ValueTried,
)
from autoaccum.planning.plan_messages import peak_bytes
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.saver_trials import format_savers
from autoaccum.reporting.comparison_table import row_line
from autoaccum.reporting.console import NotebookConsole, PlainConsole, Table, clean, one_line, print_labelled
from autoaccum.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self


LINE_SECONDS = 12.0
"""Between two lines without a terminal."""
_LOG_WIDTH = 72


class Progress:
    """A live line on a terminal with printed lines above it; a context manager, which removes the live line.

    Without a terminal, what the live line would show is printed now and then, if it lasts. An error in writing to the
    console ends the drawing, not the work.

    A subclass shows a command's events in `notify`, with `show`, `say` and `warn`.

    Args:
        console: The console, usually on stderr.
        quiet: Draw only warnings, and what the workload prints.
        auto_refresh: Redraw or print the live line in a thread; otherwise only `show` redraws it.
    """

    def __init__(self, console: PlainConsole, *, quiet: bool = False, auto_refresh: bool = True) -> None:
        self.console, self.quiet, self._auto_refresh = console, quiet, auto_refresh
        self._live: rich_progress.Progress | None = None
        self._shown: set[str] = set()
        self._lasting = ""
        self._ended: threading.Event | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def show(self, line: str) -> None:
        """Set the text of the live line; without a terminal, it is printed once it has lasted for a while."""
        self._lasting = one_line(line)
        if self.quiet:
            return
        if self.console.can_redraw:
            self._guarded(self._redraw)
        elif self._auto_refresh and self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._print_lasting, args=(self._ended,), daemon=True).start()

    def say(self, line: str | Text, style: str = "") -> None:
        """Print a line above the live one, unless quiet."""
        if not self.quiet:
            self._print(clean(line, style))

    def warn(self, text: str) -> None:
        """Print a warning once, even if quiet."""
        if self._is_new(f"warning: {text}"):
            self._guarded(print_labelled, self.console, "warning", one_line(text), "yellow")

    def print_output(self, line: str) -> None:
        """Print what a workload printed, even if quiet: a line once, as each of its processes prints it again.

        Of a bar, which is redrawn after a carriage return, that is the last state, whatever its times are.
        """
        *redrawn, last = line.rstrip("\r").split("\r")
        if self._is_new(re.sub(r"[\d.:?]+", "", last) if redrawn else last):
            self._print(Text.from_ansi(last))

    def stop(self) -> None:
        """Remove the live line."""
        self._lasting = ""
        if self._ended is not None:
            self._ended.set()
        live, self._live, self._ended = self._live, None, None
        if live is not None:
            self._guarded(live.stop)
        elif isinstance(self.console, NotebookConsole):
            self.console.show_live("")

    def _is_new(self, line: str) -> bool:
        if line in self._shown:
            return False
        self._shown.add(line)
        return True

    def _redraw(self) -> None:
        if isinstance(self.console, NotebookConsole):
            self.console.show_live(self._lasting)
        elif self._live is None:
            line = rich_progress.TextColumn(
                "{task.description}", style="none", markup=False, table_column=Column(no_wrap=True)
            )
            spinner = rich_progress.SpinnerColumn("line")
            live = rich_progress.Progress(
                spinner, line, console=self.console, transient=True, auto_refresh=self._auto_refresh
            )
            live.add_task(self._lasting, total=None)
            live.start()
            self._live = live  # One whose start failed cannot be stopped.
        else:
            self._live.update(self._live.task_ids[0], description=self._lasting, refresh=True)

    def _print_lasting(self, ended: threading.Event) -> None:
        seconds = 0.0
        while not ended.wait(LINE_SECONDS):
            seconds += LINE_SECONDS
            if line := self._lasting:
                line = textwrap.shorten(line, _LOG_WIDTH, placeholder=" ...")
                self._print(Text(line).append(f" {seconds:.0f} s", "dim"))

    def _print(self, text: Text) -> None:
        self._guarded(self.console.print, text, soft_wrap=True)

    def _guarded(self, draw: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            draw(*arguments, **options)
        except OSError:  # A closed pipe or terminal.
            self.console.quiet = True


_STYLES = {"ok": "green", "tight": "yellow", "oom": "magenta", "error": "bold red"}
_DOING = {
    "loading": "loading {} ...",
    "tracing": "tracing small sizes ...",
    "timing": "timing updates in micro-batches of {} ...",
    "explaining": "finding out where the memory goes ...",
}
_COLUMNS = "{:>11}  {:<7}  {:>9}  {:>8}"


class PlanProgress(Progress):
    """Shows planning: one line per trial, and a live line for the trial that runs."""

    _predicted = False
    _solves = False

    def notify(self, event: Any) -> None:
        """Show one event."""
        match event:
            case Doing(what, subject):
                self.show(_DOING[what].format(subject))
            case Inspected():
                self._introduce(event)
            case SaversTried(savers, None):
                self.show(f"trying {format_savers(savers)} ...")
            case SaversTried(savers, Trial() as trial):
                self.stop()
                outcome = "does not fit" if trial.outcome == "oom" else trial.outcome
                self.say(f"micro-batch {_sizes(trial.parts)} with {format_savers(savers)}: {outcome}", "dim")
            case ValueTried(name, value, predicted, None):
                if not self._solves:
                    self._solves = True
                    self.stop()
                    self.say(_COLUMNS.format(name, "outcome", "peak", "time"), "dim")
                self.show(f"{'predicting' if predicted else 'trying'} {name} {value:,} ...")
            case ValueTried(_, value, predicted, Trial() as trial):
                self.stop()
                self.say(_trial_line(trial, predicted, f"{value:,}"))
            case TracedAlone(reason):
                self.stop()
                self.say(f"{reason}: to stop earlier with the best size so far, use --time-limit", "dim")
            case Explained():
                self.stop()
            case TrialStarted(number, parts):
                doing = "predicting" if self._predicted else f"trial {number}:"
                self.show(f"{doing} micro-batch {_sizes(parts)} ...")
            case ComparisonRow():
                self.stop()
                self.say(row_line(event), "dim")
            case TrialFinished(_, trial):
                self.stop()
                self.say(_trial_line(trial, self._predicted))

    def _introduce(self, event: Inspected) -> None:
        self.stop()
        self._predicted, seen = event.predicted, event.inspection.workload
        where = f"{'predicted for' if event.predicted else 'on'} {event.device} with {format_bytes(event.limit_bytes)}"
        parameters = parameter_words(seen.parameters or 0, seen.dtypes, event.inspection.spec.precision)
        about = f": {seen.model}, {parameters}, {seen.optimizer}; {where}, sizes up to {event.cap}"
        self.say(Text.assemble((seen.name, "bold"), about))
        for caution in event.inspection.cautions if event.predicted else ():
            self.say(f"warning: {caution}", "yellow")
        self.say(_COLUMNS.format("micro-batch", "outcome", "peak", "time"), "dim")


def trials_table(plan: Plan) -> Table:
    """List all trials in the order they ran."""
    table = Table(">trial", ">micro-batch", "outcome", ">peak", ">time", "")
    for number, trial in enumerate(plan.trials, start=1):
        sizes, outcome, *others = _cells(trial, plan.kind == "predicted")
        remark = "; ".join(filter(None, (_failure(trial), trial.message)))
        table.add(str(number), sizes, Text(outcome, _STYLES[trial.outcome]), *others, remark)
    return table


def parameter_words(number: int, dtypes: tuple[str, ...], precision: str) -> str:
    """Return the number of parameters, their dtypes if they are not all fp32, and the precision."""
    if dtypes == ("fp32",):
        return f"{number:,} parameters, {precision}"
    autocast = "no autocast" if precision == "fp32" else f"autocast to {precision}"
    return f"{number:,} parameters in {join_words(dtypes)}, {autocast}"


def _trial_line(trial: Trial, predicted: bool, value: str = "") -> Text:
    """Return one trial as a line: size, or else a value, outcome, peak, seconds, and what went wrong."""
    size, *others = _cells(trial, predicted)
    line = Text(_COLUMNS.format(value or size, *others))
    line.highlight_words([f" {others[0]} "], _STYLES[trial.outcome])
    remarks = [_failure(trial)]
    if trial.host_bytes is not None:
        remarks.append(f"and {format_bytes(trial.host_bytes)} of host memory")
    if trial.fresh and trial.ran:
        remarks.append("confirmed by its own trace" if predicted else "from a clean state")
    return line.append("".join(f"  {remark}" for remark in remarks if remark), "dim")


def _cells(trial: Trial, predicted: bool) -> tuple[str, str, str, str]:
    """Return size, outcome, peak and seconds.

    A predicted trial that does not fit has a peak as well: what it would take.
    """
    outcome = "no fit" if predicted and trial.outcome == "oom" else trial.outcome
    peak = peak_bytes(trial)
    is_known = peak is not None and (trial.ran or predicted)
    return _sizes(trial.parts), outcome, format_bytes(peak or 0) if is_known else "-", f"{trial.seconds:.1f} s"


def _failure(trial: Trial) -> str:
    if trial.timed_out:
        return "took too long"
    return f"in {trial.phase}" if trial.phase and not trial.ran else ""


def _sizes(parts: tuple[int, ...]) -> str:
    return " + ".join(str(part) for part in dict.fromkeys(parts))
