"""Time for an experiment that nobody asked for: it ends when that is used up."""

from __future__ import annotations

import time
from typing import Any

from autoaccum.accumulation.company.module_calls import Call

TOO_LONG = "the experiment takes too long"
_IDLE = 4
"""Waiting counts a quarter: what else the machine does must not decide what is found, and sleep must end somewhere."""


class TooLong(BaseException):
    """Ends an experiment, whatever the user's code catches."""


class Allotment:
    """Seconds for several runs; as a follower of one (`calls.following`), ends it at the next call of a module.

    Args:
        seconds: Of this thread's work.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._work, self._clock = time.thread_time(), time.perf_counter()
        self._last, self._longest = 0.0, 0.0

    @property
    def used(self) -> float:
        """Seconds that are used up."""
        return max(time.thread_time() - self._work, (time.perf_counter() - self._clock) / _IDLE)

    def begin_run(self) -> None:
        """Another run begins.

        Raises:
            TooLong: It would likely not end in time, by what the longest before it took.
        """
        now = self.used
        self._longest, self._last = max(self._longest, now - self._last), now
        if now + self._longest > self._seconds:
            raise TooLong

    def check(self) -> None:
        """Raise TooLong where all is used up."""
        if self.used > self._seconds:
            raise TooLong

    def entered(self, call: Call, arguments: Any) -> Any:
        """End the run where it takes too long: on a CPU, that of a language model may take a minute."""
        self.check()
        return arguments

    def left(self, call: Call, output: Any) -> Any:
        """Nothing is changed."""
        return output
