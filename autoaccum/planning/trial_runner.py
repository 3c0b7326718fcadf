"""Runs a plan's trials on a device, within the limits on them, keeps them, and tells of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Device, Trial
from autoaccum.errors import NotMeasuredError
from autoaccum.planning.plan_events import Listener, TrialFinished, TrialStarted
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.search import SearchStopped
from autoaccum.units import MIB, format_bytes

_RESOLUTION_BYTES = 2 * MIB
_RESOLUTION_SHARE = 0.005
_FIRST_STEP_SHARE = 0.02


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


class Runner:
    """Runs trials on `device` as `request` asks for, as long as `allowance` lets it.

    Attributes:
        trials: All trials so far, in order.
        proof_seconds: What to keep of the time for a confirmation, without its trial: the start of a process.
    """

    def __init__(self, device: Device, request: PlanRequest, tell: Listener, allowance: Allowance) -> None:
        self._device, self._request, self._tell, self._allowance = device, request, tell, allowance
        self.trials: list[Trial] = []
        self.proof_seconds = 0.0

    def try_size(self, size: int, *, fresh: bool = False) -> Trial:
        """A trial of the search: two micro-batches of `size` samples.

        Raises:
            SearchStopped: It may not be run, or the limit on time ended it.
        """
        ran = [trial.seconds for trial in self.trials if trial.ran]
        proof = self.proof_seconds + max(ran) if ran else 0.0
        left = self._allowance.seconds_left(len(self.trials), proof)
        # The whole share is one micro-batch per update: nothing accumulates then.
        parts = (size,) if size == self._request.share else (size, size)
        trial = self._run(parts, fresh=fresh, limit_seconds=left)
        if trial.timed_out and left is not None:
            self._allowance.seconds_left(None, proof)
        return trial

    def try_afresh(self, size: int) -> Trial:
        """The same from a clean state."""
        return self.try_size(size, fresh=True)

    def confirm(self, schedule: Schedule) -> Trial:
        """Run what tells of the schedule from a clean state, unless the last trial did just that.

        No limit ends it: nothing is reported that did not run (`Schedule.trial_parts`).
        """
        parts = schedule.trial_parts
        last = self.trials[-1]
        if last.fresh and last.outcome == "ok" and last.parts == parts:
            return last
        return self._run(parts, fresh=True, confirming=True)

    def try_budget(self, parts: tuple[int, ...], limit_bytes: int) -> Trial:
        """Run `parts` from a clean state, held to `limit_bytes`.

        Raises:
            SearchStopped: The limit on time ended it, or does not let it begin.
        """
        left = self._allowance.seconds_left(None, 0.0)
        trial = self._run(parts, fresh=True, limit_bytes=limit_bytes, limit_seconds=left)
        if trial.timed_out and left is not None:
            self._allowance.seconds_left(None, 0.0)
        return trial

    def _run(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool,
        confirming: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        number = len(self.trials) + 1
        self._tell(TrialStarted(number, parts, confirming, limit_bytes))
        trial = self._device.trial(parts, fresh=fresh, limit_bytes=limit_bytes, limit_seconds=limit_seconds)
        self.trials.append(trial)
        self._tell(TrialFinished(number, trial, confirming))
        return trial


def find_least(trial: Callable[[int], Trial], *, limit_bytes: int, peak_bytes: int | None) -> tuple[int, str | None]:
    """Find the least budget under which a trial runs, by running it, and by one that did not run close below.

    The peak is where it starts from: an allocator may do with less (it gives its cache back and asks again) or need
    more (what it rounds up to). From there it gallops to the other side of the answer and bisects, to 2 MiB or 0.5 %.

    Args:
        trial: Runs the schedule held to a budget in bytes, or raises SearchStopped.
        limit_bytes: A budget under which it ran.
        peak_bytes: The peak of that run; None when not measured.

    Returns:
        The least budget in bytes under which it ran, and a sentence on what ended the search early, if anything did: a
        limit, or a trial that failed by something else than its budget: the schedule is proved without it.
    """
    runs, fails = limit_bytes, 0
    step = max(_RESOLUTION_BYTES, int(_FIRST_STEP_SHARE * limit_bytes))
    budget = limit_bytes - step if peak_bytes is None else min(max(peak_bytes, 1), limit_bytes - _RESOLUTION_BYTES)
    try:
        while runs - fails > _resolution(runs):
            tried = trial(budget)
            if tried.outcome == "error":
                return runs, f"the search for the least budget ended at {format_bytes(budget)}: {tried.message}"
            if tried.ran:
                runs = budget
            else:
                fails = budget
            step *= 2
            budget = _next(runs, fails, limit_bytes, step)
    except NotMeasuredError as error:
        return runs, f"the search for the least budget ended at {format_bytes(budget)}: {error.message}"
    except SearchStopped as stop:
        return runs, f"{stop} ended the search for the least budget: it may run with less than that"
    return runs, None


def _next(runs: int, fails: int, limit_bytes: int, step: int) -> int:
    middle = (runs + fails) // 2
    if not fails:
        return max(middle, runs - step)
    return min(middle, fails + step) if runs == limit_bytes else middle


def _resolution(budget_bytes: int) -> int:
    return max(_RESOLUTION_BYTES, int(_RESOLUTION_SHARE * budget_bytes))
