"""A training's events as they come: a live line for the updates, lines of their own for what a person should know."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from autoaccum.reporting.consoles import PlainConsole
from autoaccum.reporting.plain_text import near_path, one_line
from autoaccum.reporting.progress import PlanProgress, Progress
from autoaccum.training import events
from autoaccum.units import format_bytes

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 10.0


class TrainingProgress(Progress):
    """Draws a training's events, and the planner's before it starts.

    On a terminal one line is redrawn, at most four times a second and by no thread of its own. Elsewhere a line is
    written every ten seconds, and at the end.

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
        elif not isinstance(event, events.Planning | events.EpochEnded | events.CheckpointWritten):
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


class UpdateLine:
    """What one line says of a training that is under way.

    Attributes:
        last: The last update; None before the first.
    """

    def __init__(self) -> None:
        self.last: events.Updated | None = None
        self._first_update, self._first_time, self._time = 0, 0.0, 0.0
        self._update = 0
        self._updates: int | None = None
        self._epochs: int | None = None

    def start(self, event: events.Started) -> None:
        """What there will be."""
        self._update = event.update
        self._updates, self._epochs = event.updates, event.epochs

    def update(self, event: events.Updated, now: float) -> None:
        """An update was made at `now`, in seconds."""
        if self.last is None:  # It took longer than others: state is allocated, kernels are chosen.
            self._first_update, self._first_time = event.update, now
        self.last, self._update, self._time = event, event.update, now

    def text(self) -> str:
        """The line."""
        of = "" if self._updates is None else f" of {self._updates}"
        pieces = [f"update {self._update}{of}"]
        if self.last is not None:
            if self._epochs is not None and (self._updates is None or self._epochs > 1):
                pieces[0] += f", epoch {self.last.epoch} of {self._epochs}"
            pieces.append(f"loss {self.last.loss:.4g}")
            if (left := self._seconds_left()) is not None:
                pieces.append(f"{format_seconds(left)} left")
            pieces.append(f"{_format_rate(self.last.samples_per_second)} samples/s")
            if self.last.peak_bytes is not None:
                pieces.append(f"peak {format_bytes(self.last.peak_bytes)}")
        return "  ".join(pieces)

    def _seconds_left(self) -> float | None:
        made = self._update - self._first_update
        if self._updates is None or made < 1 or self._update >= self._updates:
            return None
        return (self._time - self._first_time) / made * (self._updates - self._update)


def format_values(values: Mapping[str, float]) -> str:
    """Values by name.

    >>> format_values({"loss": 0.25, "accuracy": 0.9375})
    'loss 0.25, accuracy 0.9375'
    """
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def format_seconds(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> format_seconds(59.6), format_seconds(3723), format_seconds(100 * 3600)
    ('1:00', '1:02:03', '100:00:00')
    """
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 or not math.isfinite(rate) else f"{rate:.3g}"
