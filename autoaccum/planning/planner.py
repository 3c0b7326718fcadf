"""Make a plan: load the workload, search for the largest micro-batch that fits, prove its schedule, record it all."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoaccum.checks import is_one_of_ranks
from autoaccum.devices.base import Device, Forecast, Inspection, Trial
from autoaccum.errors import DoesNotFitError, NotMeasuredError, WorkloadError, first_line
from autoaccum.options import Reduce
from autoaccum.planning.plan_events import Inspected, Listener, Loading, TracedAlone, Tracing
from autoaccum.planning.plan_messages import (
    MemoryNeeds,
    all_notes,
    all_warnings,
    describe_workload,
    does_not_fit_error,
    peak_bytes,
    ranks_notes,
    refuted_warning,
    too_small_error,
    trial_error,
)
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, check_device_can, make_setup
from autoaccum.planning.saver_trials import SaverTrials
from autoaccum.planning.search import SearchResult, SearchStopped, search
from autoaccum.planning.throughput import Throughput, describe_knee, estimate_throughput
from autoaccum.planning.trial_runner import SearchLimits, TrialRunner, explain_memory

if TYPE_CHECKING:
    from autoaccum.accumulation.ranks.group import Ranks
    from autoaccum.sources.spec import Workload

_MIN_SIZES_TO_FORECAST, _MIN_TRIALS_TO_FORECAST = 6, 3
_FORECAST_TIME_SHARE = 0.25
"""The part of the time left that a forecast may take."""


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
    if is_one_of_ranks():
        from autoaccum.planning.ranks_plan import plan_with_ranks

        def plan_here(
            ranks: Ranks, request: PlanRequest, heard: Listener, printed: Callable[[str], None] | None
        ) -> Plan:
            setup = make_setup(workload, request, live=live, on_output=printed)
            with setup.running():
                return plan_on_device(setup, request, on_event=heard, started=started, ranks=ranks)

        return plan_with_ranks(plan_here, request, on_event, on_output)
    setup = make_setup(workload, request, live=live, on_output=on_output)
    with setup.running():
        return plan_on_device(setup, request, on_event=on_event, started=started)


def plan_on_device(
    setup: PlanSetup,
    request: PlanRequest,
    *,
    on_event: Listener | None = None,
    started: float | None = None,
    ranks: Ranks | None = None,
) -> Plan:
    """Plan as `make_plan`, on a device that is already made; the caller closes it.

    The time limit begins at `started`, by `time.monotonic`, or else now. Several `ranks` plan so at the same time, each
    on its own device.
    """
    check_device_can(setup, request)
    planner = _Planner.inspect(setup, request, on_event or (lambda event: None), started)
    planner, forecast, found = planner.find_largest()
    speeds = planner.choose_fastest(found)
    result = speeds.result
    if ranks is not None:
        result = planner.agree(result, ranks)
    schedule = planner.request.schedule(result.size)
    reduction = planner.choose_reduce(result)
    result = dataclasses.replace(result, trial=reduction.trial)
    device, parts = setup.device, result.trial.parts
    prediction = device.predict(parts) if "predict" in device.capabilities else None
    explanation, explanation_notes = explain_memory(setup, planner.request, parts, planner.limits, planner.notify)
    inspection = planner.inspection
    if planner.saver_trials is not None:
        why = planner.saver_trials.notes(inspection.savers, schedule.micro_batches)
        inspection = dataclasses.replace(inspection, notes=(*why, *inspection.notes))
    refuted = [refuted_warning(trial, larger, predicted=planner.predicts) for trial, larger in result.refuted]
    holds_own = bool(inspection.coupled) and not planner.runner.of_all_ranks
    of_ranks = ranks_notes(device, holds_own=holds_own) if schedule.world_size > 1 else ()
    planned = (*setup.notes, *speeds.notes, *forecast.notes, *reduction.notes)
    more_notes = (*planned, *of_ranks, *explanation_notes)
    return Plan.of_schedule(
        schedule,
        kind="measured" if prediction is None else "predicted",
        multiple_of=inspection.multiple_of,
        parallel=inspection.parallel,
        mesh=request.options.mesh,
        reduce=reduction.reduce,
        reduce_peaks=reduction.peaks,
        largest_fit=result.largest_fit,
        capped=result.capped,
        stopped=result.stopped,
        limit_bytes=device.limit_bytes,
        peak_bytes=peak_bytes(result.trial),
        least_bytes=None if prediction is None else prediction.least_bytes,
        band_bytes=None if prediction is None else prediction.band_bytes,
        host_bytes=result.trial.host_bytes,
        device=device.describe(),
        environment=inspection.environment,
        workload=describe_workload(inspection, setup.reference),
        trials=tuple(trial for trial in planner.runner.trials if trial is not reduction.rejected),
        warnings=all_warnings(inspection, schedule, (*refuted, *result.warnings, *speeds.warnings), prediction),
        notes=all_notes(inspection, schedule, planner.request, result.largest_fit, prediction, more_notes),
        coupling=inspection.coupling,
        explanation=explanation,
        throughput=speeds.throughput,
    )


@dataclass(frozen=True)
class _Speeds:
    """A search's result, or that with the fastest micro-batch in its place, the throughput, and what to say of it."""

    result: SearchResult
    throughput: Throughput | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Reduction:
    """The way to sum gradients over ranks that shard a model, its proof, and the peaks and trial of the other way."""

    reduce: Reduce | None
    trial: Trial
    peaks: Mapping[Reduce, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rejected: Trial | None = None


@dataclass(frozen=True)
class _Planner:
    """The steps of one plan; its `request` has the `multiple_of` that the inspection found."""

    setup: PlanSetup
    request: PlanRequest
    inspection: Inspection
    runner: TrialRunner
    limits: SearchLimits
    notify: Listener
    saver_trials: SaverTrials | None = None

    @classmethod
    def inspect(cls, setup: PlanSetup, request: PlanRequest, notify: Listener, started: float | None) -> _Planner:
        limits = SearchLimits(request.max_trials, request.options.time_limit, started=started)
        notify(Loading(setup.reference))
        chooses = request.options.chooses_savers
        saver_trials = SaverTrials(setup.device, request, limits, notify) if chooses else None
        if saver_trials is not None and saver_trials.is_of(setup.device):
            inspection, load_seconds = saver_trials.inspection, saver_trials.load_seconds
        else:
            if saver_trials is not None:  # Without savers, a card may not even have room for the inspection.
                _use_savers(setup.device, saver_trials)
            before = time.monotonic()
            inspection = setup.device.inspect(limit_seconds=request.load_limit_seconds)
            load_seconds = time.monotonic() - before
        request = request.with_multiple_of(inspection.multiple_of)
        device = setup.device
        predicts = "predict" in device.capabilities
        start_seconds = 0.0 if predicts else load_seconds  # Most of it is the start of the process.
        runner = TrialRunner(device, request, notify, limits, inspection, confirmation_start_seconds=start_seconds)
        notify(Inspected(inspection, device.name, device.limit_bytes, request.cap, predicts))
        return cls(setup, request, inspection, runner, limits, notify, saver_trials)

    @property
    def predicts(self) -> bool:
        """True if trials are predicted rather than run."""
        return "predict" in self.setup.device.capabilities

    def forecast_peaks(self) -> Forecast:
        """Forecast the peaks of all sizes, unless so few sizes or trials are left that it would save none.

        Predicted trials use the same traces as a forecast, so a limit on trials is no reason to leave it out there.
        """
        device, request = self.setup.device, self.request
        few_trials = request.max_trials is not None and request.max_trials < _MIN_TRIALS_TO_FORECAST
        if (few_trials and not self.predicts) or self.runner.joined:
            return Forecast()
        if request.cap < _MIN_SIZES_TO_FORECAST:
            return Forecast()
        least: tuple[Trial, ...] = ()
        try:
            if self.predicts and request.options.time_limit is not None and request.max_trials is None:
                least = (self.runner.try_size(self.inspection.least_size),)
            left = self.limits.seconds_left(None, 0.0)
        except SearchStopped:
            return Forecast(trials=least)
        self.notify(Tracing())
        if left is not None and not self.predicts:  # Predicted trials need the traces of a forecast.
            left *= _FORECAST_TIME_SHARE
        forecast = device.forecast(limit_seconds=left, choose=self._choose_parts)
        for reason in forecast.alone:
            self.notify(TracedAlone(reason))
        return dataclasses.replace(forecast, trials=least)

    def _choose_parts(self, trial: Callable[[int], Trial]) -> tuple[int, ...]:
        """Return the parts that would confirm the plan, as `devices.explanation.ChooseParts`."""
        request = self.request
        found = search(
            lambda size, **_: dataclasses.replace(trial(size), fresh=True),
            request.sizes(self.inspection.least_size),
            limit_bytes=self.setup.device.limit_bytes,
            predict=lambda size: peak_bytes(trial(size)),
            answer=lambda size: request.schedule(size).micro_batch,
            needs=MemoryNeeds(predicted=True),
        )
        return request.schedule(found.size).trial_parts

    def find_largest(self) -> tuple[_Planner, Forecast, SearchResult]:
        """Forecast peaks and search; with savers that suffice, if they are to be chosen.

        Raises:
            UsageError, NotMeasuredError, DoesNotFitError: As `search`, or no savers suffice.
        """
        if self.saver_trials is None:
            forecast = self.forecast_peaks()
            return self, forecast, self.search(forecast)
        while True:
            words = _use_savers(self.setup.device, self.saver_trials)
            inspection = dataclasses.replace(self.inspection, savers=words)
            planner = dataclasses.replace(self, inspection=inspection, runner=self.runner.without_trials())
            forecast = planner.forecast_peaks()
            with suppress(DoesNotFitError):
                result = planner.search(forecast)
                if result.size >= self.saver_trials.size or result.stopped is not None:
                    return planner, forecast, result
            self.saver_trials.refute(words)

    def search(self, forecast: Forecast) -> SearchResult:
        """Find the largest micro-batch that fits, whose schedule ran.

        Raises:
            UsageError, NotMeasuredError, DoesNotFitError: As `search`, or the schedule has parts too small to be
                trained: because a cap ended the search, because a limit did, or because larger ones do not fit.
        """
        least = self.inspection.least_size
        result = self._search(self.request.sizes(least), forecast)
        schedule = self.request.schedule(result.size)
        if schedule.smallest_part < least:
            raise too_small_error(schedule, result.size, least, stopped=result.stopped, capped=result.capped)
        return result

    def choose_fastest(self, largest: SearchResult) -> _Speeds:
        """Take the smallest micro-batch that is nearly as fast as the fastest, if that is preferred, and prove it."""
        if self.request.prefer != "fastest":
            return _Speeds(largest)
        sizes = self.request.ladder(largest.size, self.inspection.least_size)
        estimates = self.predicts
        try:
            known = self._estimate_speeds(sizes) if estimates else self.runner.time_updates(sizes)
        except (SearchStopped, DoesNotFitError, NotMeasuredError) as error:
            doing = "estimated" if estimates else "timed"
            kept = f"updates were not {doing}, and the plan has the largest micro-batch, not the fastest"
            return _Speeds(largest, warnings=(f"{kept}: {first_line(error)}",))
        result = largest if known.knee == largest.size else self._prove(known.knee, largest)
        return _Speeds(result, known, notes=(describe_knee(known),))

    def agree(self, result: SearchResult, ranks: Ranks) -> SearchResult:
        """Take the least of what the ranks have found; those with more run that schedule as well.

        Raises:
            OtherRanksFailed, RankLostError: As `Ranks.gather`.
            UsageError, NotMeasuredError, DoesNotFitError: As `search`.
        """
        while len(found := set(ranks.gather(result.size))) > 1:
            if result.size > min(found):
                result = self._prove(min(found), result)
        return result

    def _estimate_speeds(self, sizes: Sequence[int]) -> Throughput:
        """Estimate the speed of updates in micro-batches of `sizes`; raise SearchStopped where the limit ends it."""
        device = self.setup.device
        try:
            cost = device.count_cost(limit_seconds=self.limits.seconds_left(None, 0.0))
        except WorkloadError as error:  # Of the counter's: the trials ran.
            raise NotMeasuredError(error.message) from None
        schedules = [self.request.schedule(size).micro_batches for size in sizes]
        precision = self.inspection.precision
        return estimate_throughput(cost, device.rates, schedules, device=device.name, precision=precision)

    def _prove(self, size: int, larger: SearchResult) -> SearchResult:
        """Run the schedule of `size` from a clean state; search below it where that fails, although a larger ran."""
        trial = self.runner.try_size(size, fresh=True, unlimited=True)
        if trial.outcome == "error":
            raise trial_error(trial)
        if trial.ran:
            return dataclasses.replace(larger, size=size, trial=trial)
        below = [one for one in self.request.sizes(self.inspection.least_size) if one < size]
        if not below:
            raise does_not_fit_error(trial, self.setup.device.limit_bytes, self._memory_needs)
        found = self._search(below, Forecast())
        refuted = (*larger.refuted, (trial, larger.largest_fit), *found.refuted)
        return dataclasses.replace(found, capped=False, refuted=refuted)

    def _search(self, sizes: Sequence[int], forecast: Forecast) -> SearchResult:
        request = self.request
        return search(
            self.runner.try_size,
            sizes,
            limit_bytes=self.setup.device.limit_bytes,
            needs=self._memory_needs,
            grow=self.runner.grow if "grow" in self.setup.device.capabilities and not self.runner.joined else None,
            predict=forecast.peak_bytes,
            known=forecast.trials,
            answer=lambda size: request.schedule(size).micro_batch,
            from_largest=self.runner.joined,
        )

    def choose_reduce(self, result: SearchResult) -> _Reduction:
        """Sum gradients with the last part where the proved schedule fits so: that takes fewer collectives."""
        device, proved, peaks = self.setup.device, result.trial, dict[Reduce, int]()
        if self.inspection.parallel != "fsdp2" or not self.predicts:
            return _Reduction(None, proved)
        peaks["each"] = peak_bytes(proved) or 0
        if len(proved.parts) == 1 or not self.request.chooses_reduce:
            return _Reduction("each", proved, peaks)
        device.use_reduce("last")
        try:
            tried = self.runner.try_again(proved.parts)
        except SearchStopped as stopped:
            device.use_reduce(None)
            return _Reduction("each", proved, peaks, (f'{stopped} ended before reduce="last" was tried',))
        if tried.outcome == "error":
            notes: tuple[str, ...] = (f'reduce="last" cannot be used: {first_line(tried.message or "")}',)
        else:
            notes, peaks["last"] = (), peak_bytes(tried) or 0
        if tried.outcome == "ok":
            return _Reduction("last", tried, peaks)
        device.use_reduce(None)
        return _Reduction("each", proved, peaks, notes, rejected=tried)

    @property
    def _memory_needs(self) -> MemoryNeeds:
        inspection = self.inspection
        return MemoryNeeds(
            least_bytes=inspection.parameter_bytes,
            update_bytes=inspection.update_bytes,
            update_samples=inspection.update_samples,
            sample_bytes=None if inspection.joining == "lockstep" else inspection.sample_bytes,
            predicted=self.predicts,
            parallel=inspection.parallel,
            holds_whole_batch=inspection.joining == "lockstep" and self.setup.device.describe().get("kind") == "cpu",
        )


def _use_savers(device: Device, trials: SaverTrials) -> tuple[str, ...]:
    """Let the device use the savers that `trials` choose, and return them."""
    words = trials.choose()
    trials.end(device)
    device.use_savers(words)
    return words
