"""Runs a plan's trials within the limits on trials and time, keeps them, and reports them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Device, GrowingDevice, TimingDevice, Trial, TrialOptions
from autoaccum.devices.explanation import PredictingDevice
from autoaccum.errors import NotMeasuredError
from autoaccum.planning.plan_events import Listener, TimingStarted, TrialFinished, TrialStarted
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.throughput import Throughput, measure_throughput
from autoaccum.units import MIB, format_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

_RESOLUTION_BYTES = 2 * MIB
_RESOLUTION_SHARE = 0.005
_FIRST_STEP_SHARE = 0.02


class SearchLimits:
    """The limits on the number of trials and on time, either of which may be None.

    Args:
        max_trials: The number of trials that the search may run.
        time_limit: Seconds from `started` on.
        started: When the time began to count, by `clock`; now when None.
        clock: Returns seconds that never decrease.
    """

    def __init__(
        self,
        max_trials: int | None,
        time_limit: float | None,
        *,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_trials, self._time_limit, self._clock = max_trials, time_limit, clock
        self._started = clock() if started is None else started

    def seconds_left(self, trials_run: int | None, reserve_seconds: float) -> float | None:
        """Return the seconds the next trial may take; None without a limit.

        Args:
            trials_run: The number of trials the search has run; None for a trial that is not the search's.
            reserve_seconds: The time to be left after it, for the confirmation.

        Raises:
            SearchStopped: A limit is reached.
        """
        if trials_run is not None and self._max_trials is not None and trials_run >= self._max_trials:
            trials = "1 trial" if self._max_trials == 1 else f"{self._max_trials} trials"
            raise SearchStopped("trials", f"the limit of {trials}")
        if self._time_limit is None:
            return None
        left = self._time_limit - (self._clock() - self._started) - reserve_seconds
        if left <= 0:
            raise SearchStopped("time", f"the time limit of {self._time_limit:g} s")
        return left


class TrialRunner:
    """Runs the trials of `request` on `device` within `limits`.

    Attributes:
        trials: All trials so far, in order.
        least_size: The smallest size that can be trained.
        joined: Whether the parts of an update need each other: trials run the whole schedule.
        of_all_ranks: Whether a rank holds the outputs of all: trials run the parts of all ranks.
        confirmation_start_seconds: The time to reserve for the start of the confirmation's process.
    """

    def __init__(self, device: Device, request: PlanRequest, notify: Listener, limits: SearchLimits) -> None:
        self._device, self._request, self._notify, self._limits = device, request, notify, limits
        self.trials: list[Trial] = []
        self.least_size = 1
        self.joined = self.of_all_ranks = False
        self.confirmation_start_seconds = 0.0

    def try_size(self, size: int, *, fresh: bool = False, unlimited: bool = False) -> Trial:
        """Run a trial of the search, as `search.RunTrial`."""
        parts = self.parts_to_try(size, fresh=fresh)
        trial = self._search(lambda left: self._run(parts, fresh=fresh, limit_seconds=left), unlimited)
        # A pair that happens to be traced by itself does not confirm a schedule of uneven parts.
        schedule = self._request.schedule(size)
        confirms = not self._scales(schedule, fresh=fresh) or parts == schedule.trial_parts
        return trial if confirms else dataclasses.replace(trial, fresh=False)

    def parts_to_try(self, size: int, *, fresh: bool = False) -> tuple[int, ...]:
        """Return the parts of a trial of the search at `size`.

        They are those of the schedule whose largest is `size`, or else two micro-batches of that size: if it has none,
        or if it is predicted, since uneven parts have to be traced by themselves. Of parts that need each other they
        are all, in their order.
        """
        schedule = self._request.schedule(size)
        is_own = schedule.micro_batch == size and schedule.smallest_part >= self.least_size
        if self.joined:
            samples = self._request.target_batch if self.of_all_ranks else self._request.share
            own = schedule.ranks if self.of_all_ranks else (schedule.micro_batches,)
            all_parts = tuple(part for parts in own for part in parts if part)
            return all_parts if is_own else (size,) * max(2, samples // size)
        return schedule.trial_parts if is_own and not self._scales(schedule, fresh=fresh) else (size, size)

    def _scales(self, schedule: Schedule, *, fresh: bool) -> bool:
        """Return whether a trial is predicted from traces of other sizes."""
        return isinstance(self._device, PredictingDevice) and not (fresh or self.joined) and schedule.iter_size > 1

    def grow(self, most: int) -> Trial:
        """Run a trial of micro-batches that grow up to `most` samples; raise SearchStopped where a limit ends it."""
        device = self._device
        assert isinstance(device, GrowingDevice)
        parts = (self.least_size, self.least_size)
        return self._search(lambda left: self._keep(parts, lambda: device.grow(most, limit_seconds=left), grows=True))

    def time_updates(self, sizes: Sequence[int]) -> Throughput:
        """Time updates in micro-batches of `sizes`, which fit; raise SearchStopped where the limit on time ends it."""
        device = self._device
        assert isinstance(device, TimingDevice)
        with device.timing() as time_update:

            def time_one(size: int) -> float:
                self._limits.seconds_left(None, self._confirmation_seconds)
                self._notify(TimingStarted(size))
                return time_update(size)

            name = str(device.describe().get("card") or device.name)
            return measure_throughput(time_one, self._request.target_batch, sizes, name)

    @property
    def _confirmation_seconds(self) -> float:
        """The time to keep for the confirmation; 0 before any trial has run."""
        seconds = [trial.seconds for trial in self.trials if trial.ran]
        return self.confirmation_start_seconds + max(seconds) if seconds else 0.0

    def _search(self, run: Callable[[float | None], Trial], unlimited: bool = False) -> Trial:
        """Call `run` with the seconds that the limits leave for a trial; None: as many as it takes."""
        if unlimited:
            return run(None)
        confirmation = self._confirmation_seconds
        left = self._limits.seconds_left(len(self.trials), confirmation)
        trial = run(left)
        if trial.timed_out and left is not None:
            self._limits.seconds_left(None, confirmation)
        return trial

    def try_again(self, parts: tuple[int, ...]) -> Trial:
        """Run `parts` from a clean state; raise SearchStopped where the limit on time ends it."""
        return self._run(parts, fresh=True, limit_seconds=self._limits.seconds_left(None, 0.0))

    def try_budget(self, parts: tuple[int, ...], limit_bytes: int) -> Trial:
        """Run `parts` from a clean state within `limit_bytes`; raise SearchStopped where the limit on time ends it."""
        left = self._limits.seconds_left(None, 0.0)
        trial = self._run(parts, fresh=True, limit_bytes=limit_bytes, limit_seconds=left)
        if trial.timed_out and left is not None:
            self._limits.seconds_left(None, 0.0)
        return trial

    def _run(self, parts: tuple[int, ...], **options: Unpack[TrialOptions]) -> Trial:
        return self._keep(parts, lambda: self._device.trial(parts, **options), options.get("limit_bytes"))

    def _keep(
        self, parts: tuple[int, ...], run: Callable[[], Trial], limit_bytes: int | None = None, *, grows: bool = False
    ) -> Trial:
        number = len(self.trials) + 1
        self._notify(TrialStarted(number, parts, limit_bytes, grows))
        trial = run()
        self.trials.append(trial)
        self._notify(TrialFinished(number, trial))
        return trial


def find_least_budget(
    trial: Callable[[int], Trial], *, limit_bytes: int, peak_bytes: int | None
) -> tuple[int, str | None]:
    """Find the smallest budget at which a trial runs, to 2 MiB or 0.5 %, by one that ran and one below that did not.

    The search starts at the peak: an allocator may do with less (it releases its cache and retries) or need more
    (sizes are rounded up). From there it gallops until the answer is bracketed, and bisects.

    Args:
        trial: Runs the schedule within a budget in bytes, or raises SearchStopped.
        limit_bytes: A budget within which it ran.
        peak_bytes: The peak of that run; None when not measured.

    Returns:
        The smallest budget in bytes at which it ran, and a note where a limit, or a trial that failed by something
        else than its budget, ended the search early.
    """
    runs, fails = limit_bytes, 0
    step = max(_RESOLUTION_BYTES, int(_FIRST_STEP_SHARE * limit_bytes))
    budget = limit_bytes - step if peak_bytes is None else min(max(peak_bytes, 1), limit_bytes - _RESOLUTION_BYTES)
    try:
        while runs - fails > max(_RESOLUTION_BYTES, int(_RESOLUTION_SHARE * runs)):
            tried = trial(budget)
            if tried.outcome == "error":
                return runs, f"the search for the least budget ended at {format_bytes(budget)}: {tried.message}"
            if tried.ran:
                runs = budget
            else:
                fails = budget
            step *= 2
            budget = (runs + fails) // 2
            if not fails:
                budget = max(budget, runs - step)
            elif runs == limit_bytes:
                budget = min(budget, fails + step)
    except NotMeasuredError as error:
        return runs, f"the search for the least budget ended at {format_bytes(budget)}: {error.message}"
    except SearchStopped as stop:
        return runs, f"{stop} ended the search for the least budget: it may run with less than that"
    return runs, None
