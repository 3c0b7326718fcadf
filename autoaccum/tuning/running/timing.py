"""How many updates of a micro-batch size are timed, and what they come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autoaccum.accumulation.schedule import split_evenly
from autoaccum.tuning.records import Speed

RISING_UPDATES = 2
"""Before anything is timed: the first update of all makes the optimizer's state, and is guarded by a copy."""

_LEAST, _ENOUGH, _MOST = 3, 5, 200
_SHORT_SECONDS, _LONG_SECONDS = 0.5, 2.0
_FAR_BEHIND = 2.0
_IN_A_ROW = 2


def needs_more(seconds: Sequence[float]) -> bool:
    """Whether more updates are to be timed.

    At least three are; five, or two seconds of them, are enough, unless they are so short that five are no time.

    >>> needs_more([1.0] * 2), needs_more([1.0] * 3), needs_more([0.2] * 4), needs_more([0.2] * 5)
    (True, False, True, False)
    >>> needs_more([0.01] * 45), needs_more([0.01] * 55), needs_more([1e-9] * 200)
    (True, False, False)
    """
    count, total = len(seconds), sum(seconds)
    if count < _LEAST:
        return True
    if count >= _MOST or total >= _LONG_SECONDS:
        return False
    return count < _ENOUGH or total < _SHORT_SECONDS


class TailOff:
    """Whether smaller micro-batches are worth a look, told by the first timed update of each, the largest first.

    >>> tail = TailOff()
    >>> [tail.is_over(seconds) for seconds in (1.0, 0.9, 1.9, 1.7, 2.0, 3.8)]
    [False, False, False, False, False, True]
    """

    def __init__(self) -> None:
        self._best = float("inf")
        self._behind = 0

    def is_over(self, seconds: float) -> bool:
        """Take in the next size's time; whether two in a row took more than twice as long as the best."""
        self._best = min(self._best, seconds)
        self._behind = self._behind + 1 if seconds > _FAR_BEHIND * self._best else 0
        return self._behind >= _IN_A_ROW


def speed_of(micro_batch: int, target_batch: int, seconds: Sequence[float]) -> Speed:
    """What timed updates come to: median and quartiles of their samples per second.

    >>> speed = speed_of(100, 256, [1.0, 2.0, 4.0])
    >>> speed.iter_size, speed.samples_per_second, speed.low, speed.high
    (3, 128.0, 96.0, 192.0)
    """
    rates = [target_batch / one for one in seconds]
    low, median, high = statistics.quantiles(rates, n=4, method="inclusive")
    return Speed(
        micro_batch=micro_batch,
        iter_size=_iter_size(micro_batch, target_batch),
        state="measured",
        samples_per_second=median,
        low=low,
        high=high,
        updates=len(rates),
    )


def unmeasured(micro_batch: int, target_batch: int, *, out_of_memory: bool) -> Speed:
    """The record of a size that ran out of memory, or was not looked at since larger ones were far behind."""
    return Speed(
        micro_batch=micro_batch,
        iter_size=_iter_size(micro_batch, target_batch),
        state="out_of_memory" if out_of_memory else "slower",
    )


def _iter_size(micro_batch: int, target_batch: int) -> int:
    return len(split_evenly(target_batch, micro_batch))
