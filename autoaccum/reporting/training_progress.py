"""A training's events as they come: a live line for the updates, lines of their own for what a person should know."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from autoaccum.reporting.consoles import PlainConsole
from autoaccum.reporting.plain_text import near_path, one_line
from autoaccum.reporting.progress import PlanProgress, Progress
from autoaccum.reporting.update_line import UpdateLine, format_values
from autoaccum.training import events

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 10.0
_EPOCH_SECONDS = 1.0


class TrainingProgress(Progress):
    """Draws a training's events, and the planner's before it starts.

    On a terminal one line is redrawn, at most four times a second and by no thread of its own. Elsewhere a line is
    written every ten seconds, at the end of epochs, and at the end.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing but warnings.
        clock: Seconds, from any beginning.
    """

    def __init__(
        self, console: PlainConsole, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, quiet=quiet, outlives_console=True, auto_refresh=False)
        self._planning = PlanProgress(console, quiet=quiet, outlives_console=True)
        self._clock = clock
        self._seconds_between = _REDRAW_SECONDS if console.can_redraw else _LINE_SECONDS
        self._next_drawn = 0.0
        self._line = UpdateLine()
        self._shown: events.Updated | None = None

    def tell(self, event: Any) -> None:
        """Draw one event, of training or of the planner."""
        if isinstance(event, events.Updated):
            now = self._clock()
            self._line.update(event, now)
            if now >= self._next_drawn:
                self._draw()
        elif isinstance(event, events.Started):
            self._planning.stop()
            self._line.start(event)
            self.say(headline(event))
            self._next_drawn = self._clock() + self._seconds_between
            self.show(self._line.text())
        elif isinstance(event, events.EpochEnded):
            self._line.end_epoch(event)
            if not self.is_live and self._clock() >= self._next_drawn - _LINE_SECONDS + _EPOCH_SECONDS:
                self._draw()
        elif isinstance(event, events.Printed):
            self._planning.pass_on(event.line)
        elif isinstance(event, events.EvaluationFailed | events.CheckpointFailed):
            self.warn(sentence(event))
        elif isinstance(event, events.ShortageMet | events.CeilingRaised | events.Evaluated | events.Skipped):
            self.say(sentence(event))
        elif isinstance(event, events.Noted):
            if event.warns:
                self.warn(event.text)
            else:
                self.say(f"note: {event.text}")
        elif not isinstance(event, events.Planning | events.CheckpointWritten | events.Finished):
            self._planning.tell(event)

    def stop(self) -> None:
        """Take the live line away, and leave the last update's."""
        self._planning.stop()
        super().stop()
        self._write()

    def _draw(self) -> None:
        """Bring the live line up to date; where there is none, write one if there is anything new."""
        self._next_drawn = self._clock() + self._seconds_between
        if self.is_live:
            self.show(self._line.text())
        else:
            self._write()

    def _write(self) -> None:
        if self._line.last is not self._shown:
            self._shown = self._line.last
            self.say(self._line.text())


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
