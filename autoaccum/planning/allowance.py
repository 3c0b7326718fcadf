"""How many trials a search may run, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable

from autoaccum.planning.search import SearchStopped


class Allowance:
    """What is left of a limit on trials and of one on time; either may be None, for no limit.

    Args:
        max_trials: How many trials the search may run.
        time_limit: Seconds from `began` on.
        began: When the clock began to count.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        max_trials: int | None,
        time_limit: float | None,
        *,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_trials, self._time_limit, self._clock = max_trials, time_limit, clock
        self._began = clock() if began is None else began

    def seconds_left(self, ran: int | None, keep_seconds: float) -> float | None:
        """The seconds the next trial may take; None: no limit.

        Args:
            ran: How many trials the search has run; None: they do not count here.
            keep_seconds: What has to be left after it: the confirmation's.

        Raises:
            SearchStopped: It may not be run.
        """
        if ran is not None and self._max_trials is not None and ran >= self._max_trials:
            trials = "1 trial" if self._max_trials == 1 else f"{self._max_trials} trials"
            raise SearchStopped("trials", f"the limit of {trials}")
        if self._time_limit is None:
            return None
        left = self._time_limit - (self._clock() - self._began) - keep_seconds
        if left <= 0:
            raise SearchStopped("time", f"the time limit of {self._time_limit:g} s")
        return left
