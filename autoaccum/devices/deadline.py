"""The end of a time limit."""

from __future__ import annotations

import time
from typing import Any


class TimeIsOver(BaseException):
    """A deadline has passed. Not an `Exception`, so that no `except Exception` swallows it."""


class Deadline:
    """The end of a time limit; never reached without a limit."""

    def __init__(self, limit_seconds: float | None) -> None:
        self.limit_seconds = limit_seconds
        self._end = None if limit_seconds is None else time.monotonic() + limit_seconds

    @property
    def left_seconds(self) -> float | None:
        """Return the seconds left, always more than 0; None without a limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.001)

    @property
    def is_over(self) -> bool:
        """Return whether no time is left."""
        return self._end is not None and time.monotonic() >= self._end

    def check(self, *_: Any) -> None:
        """Raise TimeIsOver if no time is left; also a hook of modules, whose arguments are ignored."""
        if self.is_over:
            raise TimeIsOver
