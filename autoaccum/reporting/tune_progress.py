"""A study's events as they come: one line per finished trial, and a live one for the trial that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.status import Status
from rich.text import Text

from autoaccum.planning.events import Loading
from autoaccum.reporting.consoles import PlainConsole
from autoaccum.reporting.errors import print_line
from autoaccum.reporting.plain_text import one_line
from autoaccum.reporting.progress import PlanProgress
from autoaccum.reporting.tune_lines import headline, pruner_words, space_words, speed_header, timed_line
from autoaccum.reporting.tune_words import TrialColumns, counted, format_loss, format_rate, remarks, setting_words
from autoaccum.tuning import events
from autoaccum.tuning.records import Row
from autoaccum.tuning.settings import Space

_BEST_WIDTH = 9


class TuneProgress:
    """Draws events on a console; use as a context manager, so that the live line goes away whatever happens.

    A console that cannot be written any more ends the drawing, not the study.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing but warnings (what the workload prints is passed on all the same).
    """

    def __init__(self, console: PlainConsole, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._planning = PlanProgress(console, quiet=quiet)
        self._live: Status | None = None
        self._warned: set[str] = set()
        self._space: Space | None = None
        self._columns = TrialColumns(batches=True, parts=True)
        self._running: events.TrialBegan | None = None
        self._finished, self._trials = 0, 0
        self._best: float | None = None
        self._headed = False
        self._drawers: Mapping[type, Callable[[Any], None]] = {
            events.Described: lambda event: self._say(headline(event)),
            events.StudyOpened: self._open,
            events.SpeedMeasured: self._measure,
            events.ThroughputKnown: self._know,
            events.SearchBegan: self._search,
            events.TrialBegan: self._begin,
            events.Reported: self._report,
            events.TrialEnded: self._end,
            events.WorkerLost: self._lose,
            events.WaitingForOthers: self._wait,
            events.Confirming: self._confirm,
            events.Printed: lambda event: self.pass_on(event.line),
            events.Noted: self._note,
        }

    def __enter__(self) -> TuneProgress:
        self._show("loading ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._guarded(self._stop)
        self._guarded(lambda: self._planning.__exit__(kind, error, traceback))

    def tell(self, event: Any) -> None:
        """Draw one event, of the study or of the planner."""
        drawer = self._drawers.get(type(event), self._plan)
        self._guarded(lambda: drawer(event))

    def pass_on(self, line: str) -> None:
        """A line the workload printed, above the live one."""
        self._guarded(lambda: self._console.print(Text.from_ansi(line), soft_wrap=True))

    def _guarded(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except OSError:  # A pipe without a reader, a terminal that was closed.
            self._console.quiet = True

    def _plan(self, event: Any) -> None:
        self._stop()
        if isinstance(event, Loading) and self._space is not None:
            self._say(Text("proving the plan of the best setting", "dim"))
        self._planning.tell(event)

    def _open(self, event: events.StudyOpened) -> None:
        self._finished, self._trials = event.finished, event.trials
        self._best = event.best
        where = f"study {event.name} in {event.storage}"
        done = f"; going on after {event.finished} of {counted(event.trials, 'trial')}" if event.finished else ""
        self._say(Text(f"{where}: {event.sampler}, {pruner_words(event.pruner)}{done}"))
        self._show("looking at what fits ...")

    def _measure(self, event: events.SpeedMeasured) -> None:
        if not self._headed:
            self._headed = True
            self._say(Text(speed_header(), "dim"))
        self._say(timed_line(event.speed))
        self._show("measuring samples per second ...")

    def _know(self, event: events.ThroughputKnown) -> None:
        known = event.throughput
        how = "was measured for this study before" if event.remembered else "is measured once for a study"
        self._headed = False
        self._say(Text(f"throughput {how}: knee at micro-batch {known.knee}, fastest is {known.fastest}"))

    def _search(self, event: events.SearchBegan) -> None:
        self._space, self._columns = event.space, TrialColumns.of(event.space)
        self._say(Text(space_words(event.space)))

    def _begin(self, event: events.TrialBegan) -> None:
        self._running = event
        self._show(f"{self._under_way(event)} ...")

    def _report(self, event: events.Reported) -> None:
        if self._running is not None and self._running.number == event.number:
            loss = format_loss(event.loss)
            self._show(f"{self._under_way(self._running)}, loss {loss} after {event.percent} % ...")

    def _under_way(self, event: events.TrialBegan) -> str:
        setting = f"learning rate {format_rate(event.setting.learning_rate)}"
        if self._space is not None:
            setting = setting_words(event.setting, self._space)
        if event.confirms is not None:
            return f"trial {event.confirms} again with seed {event.seed}: {setting}"
        return f"trial {event.number}, {self._finished} of {self._trials} are done: {setting}"

    def _end(self, event: events.TrialEnded) -> None:
        row, self._running = event.row, None
        if row.confirms is None:
            self._finished += 1
            if row.state == "complete" and row.loss is not None and not row.shortages:
                self._best = row.loss if self._best is None else min(self._best, row.loss)
        self._head()
        self._say(self._line(row))

    def _head(self) -> None:
        if not self._headed:
            self._headed = True
            self._say(Text(f"{self._columns.header()}  {'best':>{_BEST_WIDTH}}", "dim"))

    def _line(self, row: Row) -> Text:
        line = self._columns.row(row)
        best = "" if row.confirms is not None else format_loss(self._best)
        line.append(f"  {best:>{_BEST_WIDTH}}", "bold" if row.loss is not None and row.loss == self._best else "")
        if said := "; ".join(remarks(row)):
            line.append(f"  {said}", "dim")
        line.rstrip()
        return line

    def _lose(self, event: events.WorkerLost) -> None:
        which = events.name_run(event.number, event.confirms, event.seed)
        again = ": it is run again" if event.again else ", and is not run again"
        self._say(Text(f"{which} is lost with its worker {event.worker}{again}", "yellow"))

    def _wait(self, event: events.WaitingForOthers) -> None:
        numbers = event.running if event.confirms is None else event.confirms
        trials = f"{'trial' if len(numbers) == 1 else 'trials'} {', '.join(map(str, numbers))}"
        what = f"{trials} of other workers" if event.confirms is None else f"other workers, which repeat {trials}"
        self._say(Text(f"waiting for {what}", "dim"))
        self._show("waiting for other workers ...")

    def _confirm(self, event: events.Confirming) -> None:
        trials = ", ".join(map(str, event.trials))
        self._say(Text(f"the best, by trial: {trials}; {counted(event.runs, 'run')} with other seeds", "dim"))

    def _note(self, event: events.Noted) -> None:
        if not event.warns:
            self._say(Text(f"note: {one_line(event.text)}"))
        elif event.text not in self._warned:
            self._warned.add(event.text)
            print_line(self._console, "warning", one_line(event.text), "yellow")

    def _say(self, text: Text) -> None:
        if not self._quiet:
            self._stop()
            text.plain = one_line(text.plain)
            self._console.print(text, soft_wrap=True)

    def _show(self, text: str) -> None:
        self._stop()
        if self._console.can_redraw and not self._quiet:
            self._live = self._console.status(Text(one_line(text)), spinner="line")
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
