"""Runs a plan's trials, one after the other, within the limits on trials and time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoaccum.accumulation.schedule import Schedule
from autoaccum.checks import counted
from autoaccum.devices.base import Device, Inspection, Trial
from autoaccum.planning.plan_events import Doing, Listener, TrialFinished, TrialStarted
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.throughput import Throughput, measure_throughput


@dataclass(frozen=True)
class SearchLimits:
    """The limits of a search, each of which may be None.

    Attributes:
        max_trials: The number of trials that the search may run.
        time_limit: Seconds from `started` on, by `clock`.
    """

    max_trials: int | None = None
    time_limit: float | None = None
    started: float = field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic

    def check_number(self, trials: int) -> None:
        """Raise SearchStopped if the search, which has run so many trials, may run no other."""
        if self.max_trials is not None and trials >= self.max_trials:
            raise SearchStopped("trials", f"the limit of {counted(self.max_trials, 'trial')}")

    def seconds_left(self, reserve_seconds: float = 0.0) -> float | None:
        """Return the seconds left but for a reserve, None without a limit; raise SearchStopped if there are none."""
        if self.time_limit is None:
            return None
        left = self.time_limit - (self.clock() - self.started) - reserve_seconds
        if left <= 0:
            raise SearchStopped("time", f"the time limit of {self.time_limit:g} s")
        return left


class TrialRunner:
    """Runs trials on a device, and tells of each.

    Attributes:
        trials: All trials so far, in order; nothing is ever removed.
        needs_whole_batch: Whether the parts of an update need each other: trials run the whole schedule.
        is_command: Whether a command runs: the trial that confirms its schedule runs all parts of an update.
        of_all_ranks: Whether a rank holds the outputs of all: trials run the parts of all ranks.

    Args:
        device: The device.
        request: The request.
        inspection: What is known of the workload.
        limits: The limits on the trials.
        notify: Gets `TrialStarted`, `TrialFinished` and `Doing`.
        start_seconds: The time that a fresh process takes to start, reserved for the confirmation.
    """

    def __init__(
        self,
        device: Device,
        request: PlanRequest,
        inspection: Inspection,
        limits: SearchLimits,
        notify: Listener,
        *,
        start_seconds: float = 0.0,
    ) -> None:
        self._device, self._request, self._limits, self._notify = device, request, limits, notify
        self._least_size, self._start_seconds = inspection.least_size, start_seconds
        self.trials: list[Trial] = []
        self.needs_whole_batch = inspection.workload.whole_batch is not None
        self.is_command = bool(inspection.workload.command)
        # Two passes keep no more than the outputs of a rank's parts, and each rank computes the loss of all outputs.
        self.of_all_ranks = request.options.world_size > 1 and inspection.workload.whole_batch == "recompute"

    def try_size(self, size: int, *, fresh: bool = False, unlimited: bool = False) -> Trial:
        """Run a trial of the search, as `search.RunTrial`, within the limits unless `unlimited`."""
        schedule, reserve = self._request.schedule(size), self._reserve_seconds
        parts = schedule.micro_batches if self.is_command and unlimited else self.parts_to_try(size, fresh=fresh)
        left = None
        if not unlimited:
            self._limits.check_number(len(self.trials))
            left = self._limits.seconds_left(reserve)
        trial = self._run(parts, fresh=fresh, limit_seconds=left)
        if trial.timed_out and left is not None:  # If time is left, the trial's own limit ended it: an error.
            self._limits.seconds_left(reserve)
        if self.is_command:  # It may hold all that it reads for an update.
            return dataclasses.replace(trial, fresh=trial.fresh and parts == schedule.micro_batches)
        # A pair that happens to be traced by itself does not confirm a schedule of uneven parts.
        confirms = not self._scales(schedule, fresh=fresh) or parts == schedule.trial_parts
        return trial if confirms else dataclasses.replace(trial, fresh=False)

    def try_parts(self, parts: tuple[int, ...]) -> Trial:
        """Run `parts` from a clean state; raise SearchStopped where the limit on time ends it."""
        return self._run(parts, fresh=True, limit_seconds=self._limits.seconds_left())

    def parts_to_try(self, size: int, *, fresh: bool = False) -> tuple[int, ...]:
        """Return the parts of a trial of the search at `size`.

        They are those of the schedule whose largest is `size`, or else two micro-batches of that size: if it has none,
        or if it is predicted, since uneven parts have to be traced by themselves. Of parts that need each other they
        are all, in their order.
        """
        schedule = self._request.schedule(size)
        is_own = schedule.micro_batch == size and schedule.smallest_part >= self._least_size
        if self.needs_whole_batch:
            samples = schedule.target_batch if self.of_all_ranks else self._request.rank_samples
            ranks = schedule.ranks if self.of_all_ranks else (schedule.micro_batches,)
            all_parts = tuple(part for parts in ranks for part in parts if part)
            return all_parts if is_own else (size,) * max(2, samples // size)
        return schedule.trial_parts if is_own and not self._scales(schedule, fresh=fresh) else (size, size)

    def time_updates(self, sizes: Sequence[int]) -> Throughput:
        """Time updates in micro-batches of `sizes`, which fit; raise SearchStopped where the limit on time ends it."""
        with self._device.timing() as time_update:

            def time_one(size: int) -> float:
                self._limits.seconds_left(self._reserve_seconds)
                self._notify(Doing("timing", size))
                return time_update(size)

            name = self._device.describe().card or self._device.name
            return measure_throughput(time_one, self._request.target_batch or sizes[-1], sizes, name)

    def _scales(self, schedule: Schedule, *, fresh: bool) -> bool:
        """Return whether a trial is predicted from traces of other sizes."""
        may_predict = self._device.predictor is not None and not self.needs_whole_batch
        return may_predict and not fresh and schedule.iter_size > 1

    @property
    def _reserve_seconds(self) -> float:
        """The time to keep for the confirmation; 0 before any trial has run."""
        seconds = [trial.seconds for trial in self.trials if trial.ran]
        return self._start_seconds + max(seconds) if seconds else 0.0

    def _run(self, parts: tuple[int, ...], *, fresh: bool, limit_seconds: float | None) -> Trial:
        number = len(self.trials) + 1
        self._notify(TrialStarted(number, parts))
        trial = self._device.trial(parts, fresh=fresh, limit_seconds=limit_seconds)
        self.trials.append(trial)
        self._notify(TrialFinished(number, trial))
        return trial
