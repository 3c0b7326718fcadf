"""A training's events as they come: a live line for the updates, lines of their own for what a person should know."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.live import Live
from rich.text import Text

from autoaccum.reporting.consoles import PlainConsole
from autoaccum.reporting.errors import print_line
from autoaccum.reporting.plain_text import near_path, one_line
from autoaccum.reporting.progress import PlanProgress
from autoaccum.reporting.update_line import UpdateLine, format_values
from autoaccum.training import events

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 10.0
_EPOCH_SECONDS = 1.0


class TrainingProgress:
    """Draws events on a console; use as a context manager, so that the live line goes away whatever happens.

    On a terminal one line is redrawn, at most four times a second and by no thread of its own: each time costs a
    millisecond or two, and an update in between a microsecond. Elsewhere a line is written every ten seconds, at the
    end of epochs, and at the end. A console that cannot be written any more ends the drawing, not the training.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing but warnings.
        clock: Seconds, from any beginning.
    """

    def __init__(
        self, console: PlainConsole, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._clock = clock
        self._planning = PlanProgress(console, quiet=quiet)
        self._live: Live | None = None
        self._seconds_between = _REDRAW_SECONDS if console.can_redraw else _LINE_SECONDS
        self._next_drawn = 0.0
        self._warned: set[str] = set()
        self._line = UpdateLine()
        self._shown: events.Updated | None = None
        self._drawers: Mapping[type, Callable[[Any], None]] = {
            events.Planning: lambda _: None,
            events.Printed: lambda event: self._planning.pass_on(event.line),
            events.Started: self._start,
            events.Updated: self._update,
            events.EpochEnded: self._end_epoch,
            events.ShortageMet: self._say_above,
            events.CeilingRaised: self._say_above,
            events.Evaluated: self._say_above,
            events.Skipped: self._say_above,
            events.EvaluationFailed: self._warn_above,
            events.CheckpointFailed: self._warn_above,
            events.CheckpointWritten: lambda _: None,
            events.Noted: self._note,
            events.Finished: lambda _: self._stop(),
        }

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._guarded(self._stop)

    def tell(self, event: Any) -> None:
        """Draw one event, of training or of the planner."""
        draw = self._drawers.get(type(event), self._planning.tell)
        self._guarded(draw, event)

    def warn(self, text: str) -> None:
        """A warning, once; also where it is quiet."""
        if text not in self._warned:
            self._warned.add(text)
            self._guarded(print_line, self._console, "warning", one_line(text), "yellow")

    def _guarded(self, draw: Callable[..., None], *arguments: Any) -> None:
        try:
            draw(*arguments)
        except OSError:  # A pipe without a reader, a terminal that was closed.
            self._console.quiet = True

    def _start(self, event: events.Started) -> None:
        self._planning.__exit__(None, None, None)
        self._line.start(event)
        self._next_drawn = self._clock() + self._seconds_between
        if self._quiet:
            return
        self._print(Text(headline(event)))
        if self._console.can_redraw:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            self._draw()

    def _update(self, event: events.Updated) -> None:
        now = self._clock()
        self._line.update(event, now)
        if now >= self._next_drawn and not self._quiet:
            self._draw()

    def _end_epoch(self, event: events.EpochEnded) -> None:
        self._line.end_epoch(event)
        if self._live is None and self._clock() >= self._next_drawn - _LINE_SECONDS + _EPOCH_SECONDS:
            self._draw()

    def _draw(self) -> None:
        """Bring the live line up to date; where there is none, write one if there is anything new."""
        self._next_drawn = self._clock() + self._seconds_between
        if self._live is not None:
            self._live.update(self._line.drawn(self._console.width), refresh=True)
        elif self._line.last is not self._shown and not self._quiet:
            self._shown = self._line.last
            self._print(Text(self._line.plain()))

    def _stop(self) -> None:
        self._planning.__exit__(None, None, None)
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
        self._draw()

    def _say_above(self, event: Any) -> None:
        if not self._quiet:
            self._print(Text(one_line(sentence(event))))

    def _warn_above(self, event: Any) -> None:
        self.warn(sentence(event))

    def _note(self, event: events.Noted) -> None:
        if event.warns:
            self.warn(event.text)
        elif not self._quiet:
            self._print(Text(f"note: {one_line(event.text)}"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def headline(event: events.Started) -> str:
    """What is trained, where, and from where on."""
    parts = f"in micro-batches of up to {event.micro_batch}" if event.micro_batch < event.target_batch else "whole"
    text = f"training {type(event.model).__name__} on {event.device}: {event.target_batch} samples per update, {parts}"
    if event.resumed_from is not None:
        text += f"; going on after update {event.update}, from {near_path(event.resumed_from)}"
    return one_line(text)


def sentence(event: Any) -> str:
    """An event that has a line of its own."""
    if isinstance(event, events.ShortageMet):
        return (
            f"update {event.update}: out of memory in {event.phase} with micro-batches of {event.micro_batch}, "
            f"repeated with at most {event.next_micro_batch}"
        )
    if isinstance(event, events.CeilingRaised):
        return f"update {event.update}: memory was calm, micro-batches of up to {event.micro_batch} are tried again"
    if isinstance(event, events.Evaluated):
        values = format_values(event.values)
        return f"update {event.update}: evaluation {values} ({event.samples:,} samples in {event.seconds:.1f} s)"
    if isinstance(event, events.EvaluationFailed):
        return f"update {event.update}: the evaluation could not be finished, training goes on: {event.reason}"
    if isinstance(event, events.CheckpointFailed):
        return f"update {event.update}: no checkpoint could be written, earlier ones are as they were: {event.reason}"
    assert isinstance(event, events.Skipped)
    return f"update {event.update} is skipped: {event.reason}"
