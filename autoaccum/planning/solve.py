"""Find the largest value of a name, such as a length, with which a micro-batch fits, and plan with that value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from autoaccum.checks import check_alone
from autoaccum.devices.base import Device, Trial
from autoaccum.errors import AutoaccumError, NotMeasuredError, WorkloadError
from autoaccum.messages import Message, message
from autoaccum.planning.plan_events import Doing, Listener, ValueTried
from autoaccum.planning.plan_messages import MemoryNeeds, peak_bytes, trial_error
from autoaccum.planning.plan_record import Plan, Solved, ValueTrial
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.search import search
from autoaccum.planning.trial_runner import SearchLimits, TrialRunner
from autoaccum.sources.command import CommandSource

_NOISE = 0.01
"""The share by which a larger value may need less memory than a smaller one, before that is worth a warning."""


def solve_plan(
    workload: Any,
    request: PlanRequest,
    *,
    live: Mapping[str, Any] | None = None,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Plan:
    """Find the largest of `request.solve` that fits, and plan with it; arguments are those of `planner.make_plan`.

    What fits is `request.fit_micro_batch`, or else the least micro-batch that can be trained: its trial ran, and that
    of the next value did not, each from a clean state. Without a target batch, an update is one such micro-batch. The
    limits on trials and time are those of the search, and then of the plan.

    Raises:
        UsageError: An option cannot be honoured, or nothing has that name.
        WorkloadError: A value cannot be used.
        DoesNotFitError: The smallest value does not fit.
        NotMeasuredError: There is no answer.
    """
    check_alone("plan with --solve")
    limits = SearchLimits(request.max_trials, request.options.time_limit)
    make = partial(make_setup, live=live, on_output=on_output)
    with ExitStack() as devices:
        trials = _ValueTrials(request, workload, make, limits, on_event or (lambda event: None), devices)
        solved = trials.find_largest()
        how: dict[str, Any] = {"on_event": on_event, "started": limits.started, "known": (solved.proof,)}
        plan = plan_on_device(trials.turn_to(solved.value), trials.request, **how)
    return dataclasses.replace(plan, solved=solved, warnings=(*plan.warnings, *check_order(solved)))


def _plan_request(request: PlanRequest, workload: Any) -> PlanRequest:
    """Return the request of the plan; without a target batch, an update is the micro-batch that has to fit."""
    changes: dict[str, Any] = {"solve": None, "fit_micro_batch": None}
    if request.target_batch is None:
        size = request.fit_micro_batch or request.multiple_of
        is_told = not isinstance(workload, CommandSource) or workload.takes_iter_size
        changes |= {"target_batch": size * request.options.world_size} if is_told else {"max_micro_batch": size}
    return dataclasses.replace(request, **changes)


@dataclass
class _ValueTrials:
    """Trials of one micro-batch with different values of a name.

    On a device of this machine all have the budget of the first. Of simulated devices, that of the largest value that
    ran is kept, as the plan needs its traces; others are closed.
    """

    asked: PlanRequest
    workload: Any
    make_setup: Callable[..., PlanSetup]
    limits: SearchLimits
    notify: Listener
    devices: ExitStack
    tried: list[ValueTrial] = field(default_factory=list)
    kept: tuple[int, PlanSetup] | None = None
    device: Device | None = None

    def __post_init__(self) -> None:
        ((self.name, self.values),) = (self.asked.solve or {}).items()
        self.request = _plan_request(self.asked, self.workload)

    def find_largest(self) -> Solved:
        """Search, after an inspection with the smallest value."""
        low, values = self.values[0], self.values
        self.notify(Doing("loading", getattr(self.workload, "name", str(self.workload))))
        first = self.turn_to(low)
        try:
            self.inspection = first.device.inspect(limit_seconds=self.request.load_limit_seconds)
        except AutoaccumError as error:
            raise self._at(low, error) from None
        self.request = self.request.with_multiple_of(self.inspection.multiple_of)
        self.size = self.request.size_to_fit(self.asked.fit_micro_batch, self.inspection.least_size)
        self.kept = (low, first) if self.predicts else None
        is_command = bool(self.inspection.workload.command)
        needs = MemoryNeeds(quantity=self.name, curved=True, predicted=self.predicts, of_command=is_command)
        found = search(self._try, values, limit_bytes=first.device.limit_bytes, needs=needs)
        asked: dict[str, Any] = {"name": self.name, "low": low, "high": values[-1], "step": values.step}
        seen: dict[str, Any] = {"value": found.size, "stopped": found.stopped, "tried": tuple(self.tried)}
        return Solved(micro_batch=self.size, **asked, **seen)

    def turn_to(self, value: int) -> PlanSetup:
        """Return the setup with a value."""
        if self.kept is not None and self.kept[0] == value:
            return self.kept[1]
        options = self.asked.options
        options = dataclasses.replace(options, overrides={**options.overrides, self.name: value})
        workload = self.workload
        if isinstance(workload, CommandSource):
            workload = CommandSource.of(workload.words, workload.folder, {self.name: value})
        setup = self.make_setup(workload, dataclasses.replace(self.request, options=options))
        if self.device is None or self.predicts:
            self.device = self.devices.enter_context(setup.running())
        else:
            self.device.turn_to(setup.settings)
        return dataclasses.replace(setup, device=self.device)

    @property
    def predicts(self) -> bool:
        """Whether trials are predictions, on devices of their own."""
        return self.device is not None and self.device.predictor is not None

    def _try(self, size: int, *, fresh: bool, unlimited: bool) -> Trial:
        """Run a trial with a value, as `search.RunTrial`, where the size of a trial is the value."""
        if not unlimited:
            self.limits.check_number(len(self.tried))
        self.notify(ValueTried(self.name, size, self.predicts))
        setup = self.turn_to(size)
        try:
            if self.predicts and self.inspection.workload.whole_batch is not None:
                setup.device.inspect()  # It has to know that the parts of an update need each other.
            runner = TrialRunner(setup.device, self.request, self.inspection, self.limits, lambda event: None)
            trial = runner.try_size(self.size, fresh=True, unlimited=unlimited)
            self.tried.append(ValueTrial(value=size, trial=trial))
            self.notify(ValueTried(self.name, size, self.predicts, trial))
            if trial.outcome == "error":
                raise trial_error(trial)
        except AutoaccumError as error:
            raise self._at(size, error) from None
        if self.kept is not None and size > self.kept[0] and trial.ran:
            setup, self.kept = self.kept[1], (size, setup)
        if self.kept is not None and setup is not self.kept[1]:
            setup.device.close()
        return dataclasses.replace(trial, parts=(size,))

    def _at(self, value: int, error: AutoaccumError) -> AutoaccumError:
        """Return an error that tells the value, and how to leave it out if the code refuses it."""
        text, low = f"{self.name} {value}: {error.message}", self.values[0]
        if isinstance(error, NotMeasuredError):
            return NotMeasuredError(text, hint=error.hint)
        if not isinstance(error, WorkloadError):
            return error
        step = f"give a STEP whose values the code takes (--solve {self.name}={low}..{self.values[-1]}:STEP)"
        hint = error.hint if value == low else step
        return WorkloadError(text, hint=hint, user_traceback=error.user_traceback)


def check_order(solved: Solved) -> list[Message]:
    """Return a warning where a larger value ran with less memory than a smaller one, or where that did not run."""
    for smaller, larger in pairwise(sorted(solved.tried, key=lambda tried: tried.value)):
        # What is reserved hangs on the order of allocations as well.
        before, after = (
            tried.trial.peak_allocated_bytes or peak_bytes(tried.trial) or 0 for tried in (smaller, larger)
        )
        if larger.trial.ran and (after < before * (1 - _NOISE) or not smaller.trial.ran):
            return [message("not_monotone", name=solved.name, smaller=smaller.value, larger=larger.value)]
    return []
