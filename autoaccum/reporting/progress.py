"""A live line on a console with lines above it, for every command; and how a planner's events are drawn by it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import progress as rich_progress
from rich.table import Column
from rich.text import Text

from autoaccum.accumulation.schedule import Schedule, format_parts
from autoaccum.devices.base import Trial
from autoaccum.planning import plan_events
from autoaccum.reporting.console import PlainConsole, print_line
from autoaccum.reporting.tables import one_line
from autoaccum.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

_STYLES = {"ok": "green", "tight": "yellow", "oom": "magenta", "error": "bold red"}
_NO_FIT = "no fit"
_COLUMNS = "{size:>11}  {outcome:<7}  {peak:>9}  {seconds:>8}"


class Progress:
    """A live line on a terminal, and lines above it; a context manager, so that the live line goes away in any case.

    A subclass draws a command's events in `tell`, with `show`, `say` and `warn`.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing but warnings (what the workload prints is passed on all the same).
        outlives_console: A console that cannot be written any more ends the drawing, not the work.
        auto_refresh: Redraw the live line by a thread of its own; otherwise only `show` redraws it.
    """

    def __init__(
        self,
        console: PlainConsole,
        *,
        quiet: bool = False,
        outlives_console: bool = False,
        auto_refresh: bool = True,
    ) -> None:
        self.console, self.quiet = console, quiet
        self._outlives_console, self._auto_refresh = outlives_console, auto_refresh
        self._live: rich_progress.Progress | None = None
        self._warned: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_live(self) -> bool:
        """Whether there is a live line now."""
        return self._live is not None

    def show(self, line: str | Text) -> None:
        """Have the live line say this; nothing where there is no terminal."""
        if self.console.can_redraw and not self.quiet:
            self._guarded(self._show, Text(one_line(line)) if isinstance(line, str) else line)

    def say(self, line: str | Text, style: str = "") -> None:
        """Print a line above the live one; nothing where it is quiet."""
        if not self.quiet:
            text = Text(line, style) if isinstance(line, str) else line
            text.plain = one_line(text.plain)
            self._print(text)

    def warn(self, text: str) -> None:
        """Print a warning, once, also where it is quiet."""
        if text not in self._warned:
            self._warned.add(text)
            self._guarded(print_line, self.console, "warning", one_line(text), "yellow")

    def pass_on(self, line: str) -> None:
        """Print what a workload printed, also where it is quiet."""
        self._print(Text.from_ansi(line))

    def stop(self) -> None:
        """Take the live line away."""
        live, self._live = self._live, None
        if live is not None:
            self._guarded(live.stop)

    def _show(self, line: Text) -> None:
        if self._live is None:
            spinner, column = rich_progress.SpinnerColumn("line"), _LineColumn(Column(no_wrap=True))
            self._live = rich_progress.Progress(
                spinner, column, console=self.console, transient=True, auto_refresh=self._auto_refresh
            )
            self._live.add_task("", total=None, line=line)
            self._live.start()
        else:
            self._live.update(self._live.task_ids[0], line=line, refresh=True)

    def _print(self, text: Text) -> None:
        self._guarded(self.console.print, text, soft_wrap=True)

    def _guarded(self, draw: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            draw(*arguments, **options)
        except OSError:  # A pipe without a reader, a terminal that was closed.
            if not self._outlives_console:
                raise
            self.console.quiet = True


class _LineColumn(rich_progress.ProgressColumn):
    def render(self, task: rich_progress.Task) -> Text:
        line: Text = task.fields["line"]
        return line


class PlanProgress(Progress):
    """Draws a planner's events: one line per trial, and a live one for the trial that runs."""

    _schedule: Schedule | None = None
    _seeks_least = _predicted = False

    def __init__(self, console: PlainConsole, **options: Any) -> None:
        super().__init__(console, **options)
        self._tried: set[tuple[int, ...]] = set()

    def tell(self, event: plan_events.Event) -> None:
        """Draw one event."""
        if isinstance(event, plan_events.Loading):
            self.show(f"loading {event.reference} ...")
        elif isinstance(event, plan_events.Inspected):
            self.stop()
            self._predicted = event.predicted
            self.say(_headline(event))
            self.say(_COLUMNS.format(size="micro-batch", outcome="outcome", peak="peak", seconds="time"), "dim")
        elif isinstance(event, plan_events.Tracing):
            self.show("tracing small sizes ...")
        elif isinstance(event, plan_events.ExplanationStarted):
            self.show("finding out where the memory goes ...")
        elif isinstance(event, plan_events.Explained):
            self.stop()
        elif isinstance(event, plan_events.Scheduled):
            self._schedule = event.schedule
        elif isinstance(event, plan_events.TrialStarted):
            self._begin(event)
        elif isinstance(event, plan_events.TrialFinished):
            self._end(event)

    def _begin(self, event: plan_events.TrialStarted) -> None:
        if event.confirming and self._schedule is not None:
            how = "by a trace of its own" if self._predicted else "from a clean state"
            self.say(f"confirming {format_parts(self._schedule.micro_batches)} {how}", "dim")
        if event.limit_bytes is not None and not self._seeks_least:
            self._seeks_least = True
            self.say("the least budget at which that still runs", "dim")
        within = "" if event.limit_bytes is None else f" within {format_bytes(event.limit_bytes)}"
        doing = "predicting" if self._predicted else f"trial {event.number}:"
        self.show(f"{doing} micro-batch {_sizes(event.parts, event.confirming)}{within} ...")

    def _end(self, event: plan_events.TrialFinished) -> None:
        self.stop()
        line = trial_line(event.trial, confirming=event.confirming, predicted=self._predicted)
        if not event.confirming and event.trial.limit_bytes is None:
            if event.trial.fresh and event.trial.parts in self._tried:
                line.append("  once more, in a fresh process", "dim")
            self._tried.add(event.trial.parts)
        self.say(line)


def trial_line(trial: Trial, *, confirming: bool = False, predicted: bool = False) -> Text:
    """One trial on one line: size, outcome, peak, seconds, and what went wrong.

    A predicted one has a peak even where it does not fit: what it would take.

    >>> trial_line(Trial(parts=(8, 8), outcome="oom", phase="backward", seconds=1.25)).plain
    '          8  oom              -     1.2 s  in backward'
    """
    peak = trial.peak_allocated_bytes if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes
    shown = peak is not None and (trial.ran or predicted)
    outcome = _NO_FIT if predicted and trial.outcome == "oom" else trial.outcome
    line = _COLUMNS.format(
        size=_sizes(trial.parts, confirming) if trial.limit_bytes is None else format_bytes(trial.limit_bytes),
        outcome=outcome,
        peak=format_bytes(peak or 0) if shown else "-",
        seconds=f"{trial.seconds:.1f} s",
    )
    text = Text(line)
    text.highlight_words([f" {outcome} "], _STYLES[trial.outcome])
    if trial.timed_out:
        return text.append("  took too long", "dim")
    return text.append(f"  in {trial.phase}", "dim") if trial.phase and not trial.ran else text


def _headline(event: plan_events.Inspected) -> Text:
    seen = event.inspection
    where = "predicted for" if event.predicted else "on"
    return Text.assemble(
        (seen.name, "bold"),
        f": {seen.model}, {seen.parameters:,} parameters, {seen.precision}, {seen.optimizer}; "
        f"{where} {event.device} with {format_bytes(event.limit_bytes)}, sizes up to {event.cap}",
    )


def _sizes(parts: tuple[int, ...], confirming: bool) -> str:
    sizes = tuple(dict.fromkeys(parts)) if confirming else parts[:1]
    return " + ".join(map(str, sizes))
