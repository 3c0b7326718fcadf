"""Runs a plan's trials, and explains their memory, within the limits on trials and time."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Device, Inspection, Trial, TrialOptions
from autoaccum.devices.explanation import Explanation
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.planning.plan_events import (
    Explained,
    ExplanationStarted,
    Listener,
    TimingStarted,
    TrialFinished,
    TrialStarted,
)
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.throughput import Throughput, measure_throughput

if TYPE_CHECKING:
    from typing_extensions import Unpack


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

    Args:
        device: The device.
        request: The request.
        notify: Gets `TrialStarted`, `TrialFinished` and `TimingStarted`.
        limits: The limits on the trials.
        inspection: What is known of the workload.
        confirmation_start_seconds: The time to reserve for the start of the confirmation's process.
    """

    def __init__(
        self,
        device: Device,
        request: PlanRequest,
        notify: Listener,
        limits: SearchLimits,
        inspection: Inspection,
        *,
        confirmation_start_seconds: float = 0.0,
    ) -> None:
        self._device, self._request, self._notify, self._limits = device, request, notify, limits
        self._confirmation_start_seconds = confirmation_start_seconds
        self.trials: list[Trial] = []
        self.least_size, self.joined = inspection.least_size, inspection.joining is not None
        # Two passes keep no more than the outputs of a rank's parts, and each rank computes the loss of all outputs.
        self.of_all_ranks = request.options.world_size > 1 and inspection.joining == "twice"

    def without_trials(self) -> TrialRunner:
        """Return a runner that has run none yet."""
        runner = copy.copy(self)
        runner.trials = []
        return runner

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
        return "predict" in self._device.capabilities and not (fresh or self.joined) and schedule.iter_size > 1

    def grow(self, most: int) -> Trial:
        """Run a trial of micro-batches that grow up to `most` samples; raise SearchStopped where a limit ends it."""
        device = self._device
        parts = (self.least_size, self.least_size)
        return self._search(lambda left: self._keep(parts, lambda: device.grow(most, limit_seconds=left), grows=True))

    def time_updates(self, sizes: Sequence[int]) -> Throughput:
        """Time updates in micro-batches of `sizes`, which fit; raise SearchStopped where the limit on time ends it."""
        device = self._device
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
        return self._confirmation_start_seconds + max(seconds) if seconds else 0.0

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

    def _run(self, parts: tuple[int, ...], **options: Unpack[TrialOptions]) -> Trial:
        return self._keep(parts, lambda: self._device.trial(parts, **options))

    def _keep(self, parts: tuple[int, ...], run: Callable[[], Trial], *, grows: bool = False) -> Trial:
        number = len(self.trials) + 1
        self._notify(TrialStarted(number, parts, grows))
        trial = run()
        self.trials.append(trial)
        self._notify(TrialFinished(number, trial))
        return trial


def explain_memory(
    setup: PlanSetup, request: PlanRequest, parts: tuple[int, ...], limits: SearchLimits, notify: Listener
) -> tuple[Explanation | None, tuple[str, ...]]:
    """Return the explanation of the memory of `parts`, if requested, and notes on what is missing.

    Whatever prevents it becomes a note, since the schedule is proved already. `notify` gets the whole report.
    """
    device = setup.device
    wanted = {
        "changes": request.explain or request.report,
        "curve": request.picture or request.report,
    }
    if not any(wanted.values()) or "explain" not in device.capabilities:
        return None, ()
    notify(ExplanationStarted())
    try:
        seconds = limits.seconds_left(None, 0.0)
        account = device.explain(parts, limit_seconds=seconds, **wanted)
    except SearchStopped as stopped:
        return None, (f"where the memory goes was not traced: {stopped} was over",)
    except KeyboardInterrupt:  # The proved schedule is worth more; a second Ctrl-C ends that too.
        return None, ("where the memory goes is not known (it was interrupted)",)
    except (WorkloadError, UsageError, NotMeasuredError) as error:
        return None, (f"where the memory goes is not known ({first_line(error.message)})",)
    notify(Explained(account))
    return (account.explanation, account.notes) if request.explain else (None, ())
