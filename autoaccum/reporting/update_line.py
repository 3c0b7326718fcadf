"""One line on how a training stands: update, loss, time left, speed, peak."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autoaccum.training import events
from autoaccum.units import format_bytes


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
        self._is_known = True

    def start(self, event: events.Started) -> None:
        """What there will be."""
        self._update = event.update
        self._updates, self._epochs = event.updates, event.epochs
        self._is_known = event.updates is not None

    def update(self, event: events.Updated, now: float) -> None:
        """An update was made at `now`, in seconds."""
        if self.last is None:  # It took longer than others: state is allocated, kernels are chosen.
            self._first_update, self._first_time = event.update, now
        self.last, self._update, self._time = event, event.update, now

    def end_epoch(self, event: events.EpochEnded) -> None:
        """Where the data did not tell its length, an epoch does."""
        if not self._is_known and self._epochs is not None:
            self._updates = round(event.update / event.epoch * self._epochs)

    def text(self) -> str:
        """The line."""
        about = "" if self._is_known else "about "
        of = "" if self._updates is None else f" of {about}{self._updates}"
        pieces = [f"update {self._update}{of}"]
        if self.last is not None:
            if self._epochs is not None and not (self._is_known and self._epochs == 1):
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
