"""A live line on a terminal with printed lines above it, for every command; planning has a line for each trial."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import progress as rich_progress
from rich.table import Column, Table
from rich.text import Text

from autoaccum.checks import join_words
from autoaccum.devices.base import Trial
from autoaccum.planning import plan_events
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.saver_trials import format_savers
from autoaccum.reporting.console import PlainConsole, make_table, one_line, print_labelled
from autoaccum.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self


LINE_SECONDS = 12.0
"""Between two lines without a terminal."""


class Progress:
    """A live line on a terminal with printed lines above it; a context manager, which removes the live line.

    Without a terminal, what the live line would show is printed now and then, if it lasts.

    A subclass shows a command's events in `notify`, with `show`, `say` and `warn`.

    Args:
        console: The console, usually on stderr.
        quiet: Draw only warnings, and what the workload prints.
        outlives_console: An error in writing to the console ends the drawing, not the work.
        auto_refresh: Redraw or print the live line in a thread; otherwise only `show` redraws it.
    """

    def __init__(
        self, console: PlainConsole, *, quiet: bool = False, outlives_console: bool = False, auto_refresh: bool = True
    ) -> None:
        self.console, self.quiet = console, quiet
        self._outlives_console, self._auto_refresh = outlives_console, auto_refresh
        self._live: rich_progress.Progress | None = None
        self._warned: set[str] = set()
        self._printed: set[str] = set()
        self._lasting: Text | None = None
        self._ended: threading.Event | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_live(self) -> bool:
        """True if there is a live line now."""
        return self._live is not None

    def show(self, line: str | Text) -> None:
        """Set the text of the live line; without a terminal, it is printed once it has lasted for a while."""
        self._lasting = Text(one_line(line)) if isinstance(line, str) else line
        if self.console.can_redraw and not self.quiet:
            self._guarded(self._show, self._lasting)
        elif self._auto_refresh and not self.quiet and self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._print_lasting, args=(self._ended,), daemon=True).start()

    def say(self, line: str | Text, style: str = "") -> None:
        """Print a line above the live one, unless quiet."""
        if not self.quiet:
            text = Text(line, style) if isinstance(line, str) else line
            text.plain = one_line(text.plain)
            self._print(text)

    def warn(self, text: str) -> None:
        """Print a warning once, even if quiet."""
        if text not in self._warned:
            self._warned.add(text)
            self._guarded(print_labelled, self.console, "warning", one_line(text), "yellow")

    def print_output(self, line: str) -> None:
        """Print what a workload printed, even if quiet: a line once, as each of its processes prints it again.

        Of a bar, which is redrawn after a carriage return, that is the last state, whatever its times are.
        """
        *redrawn, last = line.rstrip("\r").split("\r")
        if (key := re.sub(r"[\d.:?]+", "", last) if redrawn else last) not in self._printed:
            self._printed.add(key)
            self._print(Text.from_ansi(last))

    def stop(self) -> None:
        """Remove the live line."""
        self._lasting = None
        if self._ended is not None:
            self._ended.set()
        live, self._live, self._ended = self._live, None, None
        if live is not None:
            self._guarded(live.stop)

    def _show(self, line: Text) -> None:
        if self._live is None:
            spinner, column = rich_progress.SpinnerColumn("line"), _LineColumn(Column(no_wrap=True))
            live = rich_progress.Progress(
                spinner, column, console=self.console, transient=True, auto_refresh=self._auto_refresh
            )
            live.add_task("", total=None, line=line)
            live.start()
            self._live = live  # One whose start failed cannot be stopped.
        else:
            self._live.update(self._live.task_ids[0], line=line, refresh=True)

    def _print_lasting(self, ended: threading.Event) -> None:
        seconds = 0.0
        while not ended.wait(LINE_SECONDS):
            seconds += LINE_SECONDS
            if (line := self._lasting) is not None:
                self._print(line.copy().append(f" {seconds:.0f} s", "dim"))

    def _print(self, text: Text) -> None:
        self._guarded(self.console.print, text, soft_wrap=True)

    def _guarded(self, draw: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            draw(*arguments, **options)
        except OSError:  # A closed pipe or terminal.
            if not self._outlives_console:
                raise
            self.console.quiet = True


class _LineColumn(rich_progress.ProgressColumn):
    def render(self, task: rich_progress.Task) -> Text:
        line: Text = task.fields["line"]
        return line


def trials_table(plan: Plan) -> Table:
    """List all trials in the order they ran."""
    table = make_table(">trial", ">micro-batch", "outcome", ">peak", ">time", "")
    predicted = plan.kind == "predicted"
    for number, trial in enumerate(plan.trials, start=1):
        remark = "; ".join(filter(None, (_failure(trial), trial.message)))
        outcome = Text(_outcome(trial, predicted), _STYLES[trial.outcome])
        peak = _trial_peak(trial, predicted)
        table.add_row(str(number), _trial_sizes(trial), outcome, peak, f"{trial.seconds:.1f} s", one_line(remark))
    return table


_STYLES = {"ok": "green", "tight": "yellow", "oom": "magenta", "error": "bold red"}
_NO_FIT = "no fit"
_DOING = {
    "loading": "loading {} ...",
    "tracing": "tracing small sizes ...",
    "timing": "timing updates in micro-batches of {} ...",
    "explaining": "finding out where the memory goes ...",
}
_COLUMNS = "{size:>11}  {outcome:<7}  {peak:>9}  {seconds:>8}"


class PlanProgress(Progress):
    """Shows planning: one line per trial, and a live line for the trial that runs."""

    _predicted = False

    def notify(self, event: plan_events.Event) -> None:
        """Show one event."""
        if isinstance(event, plan_events.Doing):
            self.show(_DOING[event.what].format(event.subject))
        elif isinstance(event, plan_events.Inspected):
            self.stop()
            self._predicted = event.predicted
            self.say(_headline(event))
            for caution in event.inspection.cautions if event.predicted else ():
                self.say(f"warning: {caution}", "yellow")
            self.say(_COLUMNS.format(size="micro-batch", outcome="outcome", peak="peak", seconds="time"), "dim")
        elif isinstance(event, plan_events.SaversTried):
            self._try_savers(event)
        elif isinstance(event, plan_events.TracedAlone):
            self.stop()
            slow = event.reason.replace("was traced", "is traced")
            self.say(f"{slow}: to stop earlier with the best size so far, give --time-limit", "dim")
        elif isinstance(event, plan_events.Explained):
            self.stop()
        elif isinstance(event, plan_events.TrialStarted):
            self._begin(event)
        elif isinstance(event, plan_events.TrialFinished):
            self._end(event)

    def _try_savers(self, event: plan_events.SaversTried) -> None:
        name = format_savers(event.savers)
        if event.trial is None:
            self.show(f"trying {name} ...")
            return
        self.stop()
        outcome = "does not fit" if event.trial.outcome == "oom" else event.trial.outcome
        self.say(f"micro-batch {_sizes(event.trial.parts)} with {name}: {outcome}", "dim")

    def _begin(self, event: plan_events.TrialStarted) -> None:
        doing = "predicting" if self._predicted else f"trial {event.number}:"
        sizes = f"{event.parts[0]} and larger ones" if event.grows else _sizes(event.parts)
        self.show(f"{doing} micro-batch {sizes} ...")

    def _end(self, event: plan_events.TrialFinished) -> None:
        self.stop()
        line = trial_line(event.trial, predicted=self._predicted)
        if event.trial.host_bytes is not None:
            line.append(f"  and {format_bytes(event.trial.host_bytes)} of host memory", "dim")
        if event.trial.fresh and event.trial.ran:
            line.append("  by a trace of its own" if self._predicted else "  from a clean state", "dim")
        self.say(line)


def trial_line(trial: Trial, *, predicted: bool = False) -> Text:
    """Return one trial as a line: size, outcome, peak, seconds, and what went wrong.

    A predicted trial that does not fit has a peak as well: what it would take.

    >>> trial_line(Trial(parts=(8, 8), outcome="oom", phase="backward", seconds=1.25)).plain
    '          8  oom              -     1.2 s  in backward'
    """
    outcome = _outcome(trial, predicted)
    line = _COLUMNS.format(
        size=_trial_sizes(trial),
        outcome=outcome,
        peak=_trial_peak(trial, predicted),
        seconds=f"{trial.seconds:.1f} s",
    )
    text = Text(line)
    text.highlight_words([f" {outcome} "], _STYLES[trial.outcome])
    return text.append(f"  {failure}", "dim") if (failure := _failure(trial)) else text


def _outcome(trial: Trial, predicted: bool) -> str:
    return _NO_FIT if predicted and trial.outcome == "oom" else trial.outcome


def _trial_peak(trial: Trial, predicted: bool) -> str:
    peak = trial.peak_allocated_bytes if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes
    return "-" if peak is None or not (trial.ran or predicted) else format_bytes(peak)


def _failure(trial: Trial) -> str:
    if trial.timed_out:
        return "took too long"
    return f"in {trial.phase}" if trial.phase and not trial.ran else ""


def parameter_words(number: int, dtypes: tuple[str, ...], precision: str) -> str:
    """Return the number of parameters, their dtypes if they are not all fp32, and the precision."""
    if dtypes == ("fp32",):
        return f"{number:,} parameters, {precision}"
    autocast = "no autocast" if precision == "fp32" else f"autocast to {precision}"
    return f"{number:,} parameters in {join_words(dtypes)}, {autocast}"


def _headline(event: plan_events.Inspected) -> Text:
    seen = event.inspection
    where = "predicted for" if event.predicted else "on"
    return Text.assemble(
        (seen.name, "bold"),
        f": {seen.model}, {parameter_words(seen.parameters, seen.dtypes, seen.precision)}, {seen.optimizer}; "
        f"{where} {event.device} with {format_bytes(event.limit_bytes)}, sizes up to {event.cap}",
    )


def _trial_sizes(trial: Trial) -> str:
    return f"{trial.parts[0]} to {trial.micro_batch}" if len(trial.peaks) > 1 else _sizes(trial.parts)


def _sizes(parts: tuple[int, ...]) -> str:
    return " + ".join(str(part) for part in dict.fromkeys(parts))
