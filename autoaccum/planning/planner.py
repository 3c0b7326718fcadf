"""Make a plan: load the workload, search for the largest micro-batch that fits, prove its schedule, record it all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autoaccum.accumulation.schedule import Schedule, format_parts
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.explanation import (
    ExplainingDevice,
    Explanation,
    Forecast,
    ForecastingDevice,
    PredictingDevice,
    Prediction,
)
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.planning.next_size import Predict
from autoaccum.planning.plan_events import (
    Explained,
    ExplanationStarted,
    Inspected,
    Listener,
    Loading,
    Scheduled,
    Tracing,
)
from autoaccum.planning.plan_messages import (
    MemoryNeeds,
    all_notes,
    all_warnings,
    describe_workload,
    does_not_fit_error,
    peak_bytes,
    trial_error,
)
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.search import SearchResult, SearchStopped, Stop, search
from autoaccum.planning.trial_runner import SearchLimits, TrialRunner, find_least_budget

if TYPE_CHECKING:
    from autoaccum.workload.spec import Workload

_MIN_SIZES_TO_FORECAST, _MIN_TRIALS_TO_FORECAST = 6, 3
_FORECAST_TIME_SHARE = 0.25
"""The part of a time limit that a forecast may take."""


def make_plan(
    workload: str | os.PathLike[str] | Workload | None,
    request: PlanRequest,
    *,
    live: Mapping[str, Any] | None = None,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Plan:
    """Plan what `autoaccum.plan` is asked for.

    Args:
        workload: A reference, a Workload, or None where live objects are given.
        request: The target batch, the options, and the limits of the search.
        live: Live objects by the names of `autoaccum.plan`'s arguments; those not given are None or left out.
        on_event: Called with each record of `autoaccum.planning.plan_events`.
        on_output: Receives each line the workload prints in processes of its own; stderr otherwise.

    Raises:
        UsageError, WorkloadError, DoesNotFitError, NotMeasuredError: As `autoaccum.plan`.
    """
    started = time.monotonic()
    setup = make_setup(workload, request, live=live, on_output=on_output)
    with setup.device:
        return plan_on_device(setup, request, on_event=on_event, started=started)


def plan_on_device(
    setup: PlanSetup, request: PlanRequest, *, on_event: Listener | None = None, started: float | None = None
) -> Plan:
    """Plan as `make_plan`, on a device that is already made; the caller closes it.

    The time limit begins at `started`, by `time.monotonic`, or else now.
    """
    check_explainable(setup, request)
    planner = _Planner.inspect(setup, request, on_event or (lambda event: None), started)
    forecast = planner.forecast_peaks()
    proved = planner.search_and_prove(forecast)
    device = setup.device
    prediction = device.predict(proved.trial.parts) if isinstance(device, PredictingDevice) else None
    least_bytes, least_notes = planner.find_least_bytes(proved, prediction)
    explanation, explanation_notes = explain_memory(
        setup, planner.request, proved.trial.parts, planner.limits, planner.notify
    )
    inspection, schedule = planner.inspection, proved.schedule
    more_notes = (*forecast.notes, *least_notes, *explanation_notes)
    return Plan.of_schedule(
        schedule,
        kind="measured" if prediction is None else "predicted",
        multiple_of=inspection.multiple_of,
        largest_fit=proved.largest_fit,
        capped=proved.capped,
        stopped=proved.stopped,
        limit_bytes=device.limit_bytes,
        peak_bytes=peak_bytes(proved.trial),
        least_bytes=least_bytes,
        band_bytes=None if prediction is None else prediction.band_bytes,
        device=device.describe(),
        environment=inspection.environment,
        workload=describe_workload(inspection, setup.reference),
        trials=tuple(planner.runner.trials),
        warnings=all_warnings(inspection, schedule, proved.warnings, prediction),
        notes=all_notes(inspection, schedule, planner.request, proved.largest_fit, prediction, more_notes),
        coupling=inspection.coupling,
        explanation=explanation,
    )


@dataclass(frozen=True)
class _ProvedSchedule:
    """A schedule whose own trial ran.

    Attributes:
        schedule: The schedule.
        trial: Its trial.
        largest_fit: The largest size that ran, below any that a confirmation refuted.
        capped: Whether `largest_fit` is the cap, and no schedule was refuted.
        stopped: The limit that ended the search early.
        warnings: Sentences on sizes and schedules that did not run as expected.
    """

    schedule: Schedule
    trial: Trial
    largest_fit: int
    capped: bool
    stopped: Stop | None
    warnings: tuple[str, ...]


class _ScheduleRefuted(Exception):
    """The trace of a schedule does not fit, although the traces of other sizes predict that its ceiling does."""


@dataclass(frozen=True)
class _Planner:
    """The steps of one plan, each from what the inspection and the earlier steps found.

    Attributes:
        setup: The workload's name and the device.
        request: The request, with the `multiple_of` that the inspection found.
        inspection: What is known of the workload before any trial.
        runner: Runs the trials and keeps them.
        limits: The limits on trials and time.
        notify: Called with each event.
    """

    setup: PlanSetup
    request: PlanRequest
    inspection: Inspection
    runner: TrialRunner
    limits: SearchLimits
    notify: Listener

    @classmethod
    def inspect(cls, setup: PlanSetup, request: PlanRequest, notify: Listener, started: float | None) -> _Planner:
        """Load and check the workload."""
        limits = SearchLimits(request.max_trials, request.options.time_limit, started=started)
        notify(Loading(setup.reference))
        before = time.monotonic()
        inspection = setup.device.inspect(limit_seconds=request.load_limit_seconds)
        load_seconds = time.monotonic() - before
        request = request.with_multiple_of(inspection.multiple_of)
        runner = TrialRunner(setup.device, request, notify, limits)
        planner = cls(setup, request, inspection, runner, limits, notify)
        if not planner.predicts:  # The confirmation starts a process, which takes most of the load time.
            runner.confirmation_start_seconds = load_seconds
        device = setup.device
        notify(Inspected(inspection, device.name, device.limit_bytes, request.cap, planner.predicts))
        return planner

    @property
    def predicts(self) -> bool:
        """True if trials are predicted rather than run."""
        return isinstance(self.setup.device, PredictingDevice)

    def forecast_peaks(self) -> Forecast:
        """Forecast the peaks of all sizes, unless so few sizes or trials are left that it would save none.

        Predicted trials use the same traces as a forecast, so a limit on trials is no reason to leave it out there.
        """
        device, request = self.setup.device, self.request
        few_trials = request.max_trials is not None and request.max_trials < _MIN_TRIALS_TO_FORECAST
        if few_trials and not self.predicts:
            return Forecast()
        if request.cap < _MIN_SIZES_TO_FORECAST or not isinstance(device, ForecastingDevice):
            return Forecast()
        self.notify(Tracing())
        limit = request.options.time_limit
        return device.forecast(limit_seconds=None if limit is None else limit * _FORECAST_TIME_SHARE)

    def search_and_prove(self, forecast: Forecast) -> _ProvedSchedule:
        """Find the largest size that fits and prove a schedule of it.

        Where the trace of the schedule refutes the prediction from other sizes, the search is repeated without the
        forecast; not under a limit, which might end the second search too early.
        """
        has_limit = self.request.max_trials is not None or self.request.options.time_limit is not None
        search_again = self.predicts and not has_limit
        try:
            return self._prove(self._search(forecast.peak_bytes), search_again=search_again)
        except _ScheduleRefuted as refuted:
            return self._prove(self._search(None), refuted=(str(refuted),))

    def find_least_bytes(
        self, proved: _ProvedSchedule, prediction: Prediction | None
    ) -> tuple[int | None, tuple[str, ...]]:
        """Return the smallest budget, where it is predicted or to be measured, and a note if its search ended early."""
        if prediction is not None:
            return prediction.least_bytes, ()
        if not self.request.least:
            return None, ()
        found, note = find_least_budget(
            lambda budget: self.runner.try_budget(proved.trial.parts, budget),
            limit_bytes=self.setup.device.limit_bytes,
            peak_bytes=peak_bytes(proved.trial),
        )
        return found, () if note is None else (note,)

    def _search(self, predict: Predict | None) -> SearchResult:
        return search(
            self.runner.try_size,
            self.request.cap,
            limit_bytes=self.setup.device.limit_bytes,
            needs=self._memory_needs,
            least_size=self.inspection.least_size,
            multiple_of=self.inspection.multiple_of,
            fresh_trial=partial(self.runner.try_size, fresh=True) if self.setup.isolated else None,
            predict=predict,
        )

    def _prove(
        self, result: SearchResult, *, search_again: bool = False, refuted: tuple[str, ...] = ()
    ) -> _ProvedSchedule:
        """Run a schedule from a clean state; while one fails, go on with a smaller micro-batch.

        Raises:
            _ScheduleRefuted: The first schedule failed and `search_again` is set.
            WorkloadError, NotMeasuredError: The trial raised an error of the workload, or of the measurement.
            DoesNotFitError: No schedule runs, or only one with parts too small to be trained. Such parts raise a
                UsageError if a cap ended the search, and a NotMeasuredError if a limit did.
        """
        accepted = {t.outcome for t in result.trials if t.micro_batch == result.largest_fit and t.ran}
        ceiling, largest_fit = result.largest_fit, result.largest_fit
        least_size = self.inspection.least_size
        failures: list[str] = []
        while True:
            schedule = self.request.schedule(ceiling)
            if schedule.smallest_part < least_size:
                raise _too_small_error(schedule, ceiling, least_size, result)
            self.notify(Scheduled(schedule, ceiling))
            trial = self.runner.confirm(schedule)
            if trial.outcome == "error":
                raise trial_error(trial)
            if trial.outcome == "ok" or trial.outcome in accepted:
                return _ProvedSchedule(
                    schedule,
                    trial,
                    max(largest_fit, trial.micro_batch),
                    capped=result.capped and not failures,
                    stopped=result.stopped,
                    warnings=(*failures, *refuted, *result.warnings),
                )
            failures.append(self._confirmation_warning(schedule, ceiling, trial))
            if search_again:
                raise _ScheduleRefuted(failures[0])
            if schedule.micro_batch == least_size:
                if trial.outcome == "oom" and not trial.certain:
                    raise NotMeasuredError(
                        f"micro-batch {trial.micro_batch} ran and failed: {trial.message or 'no message'}"
                    )
                raise does_not_fit_error(trial, self.setup.device.limit_bytes, self._memory_needs)
            ceiling = schedule.micro_batch - 1
            ran = (t.micro_batch for t in self.runner.trials if t.ran and t.micro_batch <= ceiling)
            largest_fit = max(ran, default=0)

    @property
    def _memory_needs(self) -> MemoryNeeds:
        inspection = self.inspection
        return MemoryNeeds(
            least_bytes=inspection.parameter_bytes,
            update_bytes=inspection.update_bytes,
            update_samples=inspection.update_samples,
            sample_bytes=inspection.sample_bytes,
            predicted=self.predicts,
        )

    def _confirmation_warning(self, schedule: Schedule, ceiling: int, trial: Trial) -> str:
        """Return the warning about a schedule whose trial failed, or was tight, although its ceiling had run."""
        tried = f"{format_parts(schedule.micro_batches)} {'{}'} ({trial.outcome}), although {ceiling} "
        if self.predicts:
            return tried.format("was traced and does not fit") + "does by traces of other sizes"
        return (
            tried.format("did not run again from a clean state")
            + "ran before: memory differs from one run to the next, so keep some headroom (--reserve)"
        )


def _too_small_error(schedule: Schedule, ceiling: int, least_size: int, result: SearchResult) -> AutoaccumError:
    """Return the error for parts too small to be trained: fewer parts do not fit, and more would be smaller still."""
    message = (
        f"{schedule.target_batch} samples in micro-batches of at most {ceiling} leave one of "
        f"{schedule.smallest_part}, and this model's BatchNorm needs {least_size}"
    )
    hint = f"take a target batch that micro-batches of {least_size} to {ceiling} add up to"
    if ceiling == result.largest_fit and result.stopped is not None:
        return NotMeasuredError(message, hint=f"{hint}, or allow the search more {result.stopped}")
    if ceiling == result.largest_fit and result.capped:
        return UsageError(message, hint=f"{hint}, or allow larger ones")
    return DoesNotFitError(message, hint=f"{hint}, or more memory")


def check_explainable(setup: PlanSetup, request: PlanRequest) -> None:
    """Refuse an explanation before any trial where the device has none.

    Raises:
        UsageError: An explanation is requested, and the device cannot give one.
    """
    device = setup.device
    if not request.explain or isinstance(device, ExplainingDevice):
        return
    if setup.isolated or isinstance(device, PredictingDevice):
        raise UsageError(
            f"explain (--explain) shows where the memory of a card goes, and trials run on the {device.name.upper()}",
            hint="predict for a card, which need not be here, by gpu=NAME (--gpu NAME; see `autoaccum gpus`)",
        )
    raise UsageError(
        "explain shows where the memory of a card goes, which trials in this process cannot tell",
        hint="predict for a card, which need not be here: gpu=NAME",
    )


def explain_memory(
    setup: PlanSetup, request: PlanRequest, parts: tuple[int, ...], limits: SearchLimits, notify: Listener
) -> tuple[Explanation | None, tuple[str, ...]]:
    """Return the explanation of the memory of `parts`, if requested, and notes on what is missing.

    Whatever prevents it becomes a note, since the schedule is proved already. `notify` gets the whole report.
    """
    device = setup.device
    if not (request.explain or request.picture) or not isinstance(device, ExplainingDevice):
        return None, ()
    notify(ExplanationStarted())
    try:
        seconds = limits.seconds_left(None, 0.0)
        account = device.explain(parts, changes=request.explain, curve=request.picture, limit_seconds=seconds)
    except SearchStopped as stopped:
        return None, (f"where the memory goes was not traced: {stopped} was over",)
    except KeyboardInterrupt:  # The proved schedule is worth more; a second Ctrl-C ends that too.
        return None, ("where the memory goes is not known (it was interrupted)",)
    except (WorkloadError, UsageError, NotMeasuredError) as error:
        return None, (f"where the memory goes is not known ({first_line(error.message)})",)
    notify(Explained(account))
    return (account.explanation, account.notes) if request.explain else (None, ())
