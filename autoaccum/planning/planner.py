"""Make a plan: a sequence of steps, each of which returns a decision that the next one starts from."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from autoaccum.checks import is_one_of_ranks
from autoaccum.devices.base import Forecast, Inspection, Predictor, Trial
from autoaccum.devices.explanation import Explanation
from autoaccum.errors import DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.messages import Message, message
from autoaccum.options import GradSync
from autoaccum.planning.plan_events import Doing, Explained, Inspected, Listener, TracedAlone, TrialFinished
from autoaccum.planning.plan_messages import (
    MemoryNeeds,
    all_notes,
    all_warnings,
    does_not_fit_error,
    peak_bytes,
    ranks_notes,
    refuted_by,
    too_small_error,
    trial_error,
)
from autoaccum.planning.plan_record import Plan, TokenBudget
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.saver_trials import SaverTrials, Words
from autoaccum.planning.search import SearchResult, SearchStopped, search
from autoaccum.planning.throughput import Throughput, estimate_throughput
from autoaccum.planning.token_budget import expect_batch, find_budget
from autoaccum.planning.trial_runner import SearchLimits, TrialRunner
from autoaccum.sources.command import CommandSource

if TYPE_CHECKING:
    from autoaccum.accumulation.ranks.group import Ranks
    from autoaccum.sources.workload import Workload

_MIN_SIZES_TO_FORECAST, _MIN_TRIALS_TO_FORECAST = 6, 3
_FORECAST_TIME_SHARE = 0.25
"""The part of the time left that a forecast may take."""


def make_plan(
    workload: str | os.PathLike[str] | Workload | CommandSource | None,
    request: PlanRequest,
    *,
    live: Mapping[str, Any] | None = None,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Plan:
    """Plan what `autoaccum.plan` is asked for.

    Args:
        workload: The name of a file, a Workload, a command, or None where live objects are given.
        request: The target batch, the options, and the limits of the search.
        live: Live objects by the names of `autoaccum.plan`'s arguments; those not given are None or left out.
        on_event: Called with each record of `autoaccum.planning.plan_events`.
        on_output: Receives each line the workload prints in processes of its own; stderr otherwise.

    Raises:
        UsageError, WorkloadError, DoesNotFitError, NotMeasuredError: As `autoaccum.plan`.
    """
    started = time.monotonic()

    def plan_here(
        ranks: Ranks | None, request: PlanRequest, heard: Listener | None, printed: Callable[[str], None] | None
    ) -> Plan:
        make = partial(make_setup, workload, live=live, on_output=printed)
        if request.target_tokens is not None:
            request = expect_batch(request, make)
        setup = make(request)
        with setup.running():
            return plan_on_device(setup, request, on_event=heard, started=started, ranks=ranks)

    if request.target_tokens is not None and isinstance(workload, CommandSource):
        raise UsageError(
            "--target-tokens is given, and a command counts samples", hint="give --target-batch, or plan a workload"
        )
    if not is_one_of_ranks():
        return plan_here(None, request, on_event, on_output)
    from autoaccum.planning.ranks_plan import plan_with_ranks

    return plan_with_ranks(plan_here, request, on_event, on_output)


def plan_on_device(
    setup: PlanSetup,
    request: PlanRequest,
    *,
    on_event: Listener | None = None,
    started: float | None = None,
    ranks: Ranks | None = None,
    known: tuple[Trial, ...] = (),
) -> Plan:
    """Plan as `make_plan`, on a device that is already made; the caller closes it.

    The time limit begins at `started`, by `time.monotonic`, or else now. Several `ranks` plan so at the same time, each
    on its own device. `known` are trials that this device has run from a clean state, where no savers are chosen.
    """
    if request.explain and not setup.device.explains:
        where = "the CPU" if setup.device.name == "cpu" else "one, where a command does not tell what it holds"
        raise UsageError(
            f"explain (--explain) shows where the memory of a card goes, and trials run on {where}",
            hint="predict for a card, which need not be here, by gpu=NAME (--gpu NAME; see `autoaccum gpus`)",
        )
    started = time.monotonic() if started is None else started
    planner = _Planner.start(setup, request, on_event or (lambda event: None), started)
    for number, trial in enumerate(known, start=1):
        planner.runner.trials.append(trial)
        planner.notify(TrialFinished(number, trial))
    largest, savers = planner.find_largest()
    result, throughput = planner.choose_fastest(largest)
    if ranks is not None:
        result = planner.agree(result, ranks)
    grad_sync = planner.choose_grad_sync(result)
    budget, warnings = planner.find_budget(grad_sync.result, ranks)
    plan = planner.record(grad_sync, savers, throughput)
    return dataclasses.replace(plan, tokens=budget, warnings=(*plan.warnings, *warnings))


@dataclass(frozen=True)
class _GradSyncChoice:
    """How gradients of a sharded model are summed over ranks, what proves that, and the peaks of the ways tried."""

    way: GradSync | None
    result: SearchResult
    peaks: Mapping[GradSync, int] = field(default_factory=dict)


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
    def start(cls, setup: PlanSetup, request: PlanRequest, notify: Listener, started: float) -> _Planner:
        """Inspect the workload; on an installed card that is to have savers, with those that its simulation chooses."""
        limits = SearchLimits(request.max_trials, request.options.time_limit, started)
        notify(Doing("loading", setup.settings.source.title))
        device, before, trials = setup.device, time.monotonic(), None
        if request.options.chooses_savers:
            trials = SaverTrials(device, request, limits, notify)
        if trials is not None and trials.device is device:
            inspection = trials.inspection
        else:
            if trials is not None:  # Without savers, a card may not even have room for the inspection.
                _use_savers(setup, trials)
                before = time.monotonic()
            inspection = device.inspect(limit_seconds=request.load_limit_seconds)
        request = request.with_multiple_of(inspection.multiple_of)
        predicts = device.predictor is not None
        start_seconds = 0.0 if predicts else time.monotonic() - before  # Most of it is the start of the process.
        runner = TrialRunner(device, request, inspection, limits, notify, start_seconds=start_seconds)
        notify(Inspected(inspection, device.name, device.limit_bytes, request.cap, predicts))
        return cls(setup, request, inspection, runner, limits, notify, trials)

    @property
    def predicts(self) -> bool:
        """True if trials are predicted rather than run."""
        return self.setup.device.predictor is not None

    def find_largest(self) -> tuple[SearchResult, Words | None]:
        """Search; if savers are to be chosen, with the cheapest that trials do not refute, which come second.

        Raises:
            UsageError, NotMeasuredError, DoesNotFitError: As `search`, or no savers suffice.
        """
        if self.saver_trials is None:
            return self._forecast_and_search(), None
        refuted: set[Words] = set()
        while True:
            words = _use_savers(self.setup, self.saver_trials, refuted)
            with suppress(DoesNotFitError):
                result = self._forecast_and_search()
                if result.size >= self.saver_trials.size or result.stopped is not None:
                    return result, words
            refuted.add(words)

    def choose_fastest(self, largest: SearchResult) -> tuple[SearchResult, Throughput | None]:
        """Take the smallest micro-batch that is nearly as fast as the fastest, if that is preferred, and prove it."""
        if self.request.prefer != "fastest":
            return largest, None
        sizes = self.request.ladder(largest.size, self.inspection.least_size)
        try:
            device = self.setup.device.predictor
            known = self.runner.time_updates(sizes) if device is None else self._estimate_speeds(device, sizes)
        except (SearchStopped, DoesNotFitError, NotMeasuredError) as error:
            doing = "estimated" if self.predicts else "timed"
            warning = message("not_timed", done=doing, error=first_line(error))
            return dataclasses.replace(largest, warnings=(*largest.warnings, warning)), None
        result = largest if known.knee == largest.size else self._prove(known.knee, largest)
        return dataclasses.replace(result, notes=(known.note, *result.notes)), known

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

    def choose_grad_sync(self, result: SearchResult) -> _GradSyncChoice:
        """Sum gradients with the last part where the proved schedule fits so: that takes fewer collectives."""
        device, parts = self.setup.device.predictor, result.trial.parts
        if self.inspection.parallel != "fsdp2" or device is None:
            return _GradSyncChoice(None, result)
        peaks: dict[GradSync, int] = {"each": peak_bytes(result.trial) or 0}
        if len(parts) == 1 or not self.request.chooses_grad_sync:
            return _GradSyncChoice("each", result, peaks)
        device.use_grad_sync("last")
        why = None
        try:
            tried = self.runner.try_parts(parts)
        except SearchStopped as stopped:
            why = message("grad_sync_unusable", error=f"{stopped} ended before it was tried")
        else:
            if tried.outcome == "error":
                why = message("grad_sync_unusable", error=first_line(tried.message or ""))
            else:
                peaks["last"] = peak_bytes(tried) or 0
            if tried.outcome == "ok":
                return _GradSyncChoice("last", result.proved_by(tried), peaks)
        device.use_grad_sync(None)
        notes = result.notes if why is None else (*result.notes, why)
        return _GradSyncChoice("each", dataclasses.replace(result, notes=notes), peaks)

    def find_budget(self, result: SearchResult, ranks: Ranks | None) -> tuple[TokenBudget | None, tuple[Message, ...]]:
        """Find the token budget of a workload that counts tokens; without it, a warning says why."""
        try:
            budget = find_budget(
                self.setup.device, self.request, self.inspection, result, self.limits, self.notify, ranks
            )
        except (UsageError, NotMeasuredError, DoesNotFitError) as error:
            if self.request.target_tokens is not None:
                raise
            return None, (message("no_token_budget", error=first_line(error.message)),)
        return budget, ()

    def record(self, grad_sync: _GradSyncChoice, savers: Words | None, throughput: Throughput | None) -> Plan:
        """Return the plan of what was decided, with an explanation of its memory if that is requested."""
        device, request, inspection, result = self.setup.device, self.request, self.inspection, grad_sync.result
        schedule = request.schedule(result.size)
        prediction = None if device.predictor is None else device.predictor.predict(result.trial.parts)
        explanation, explanation_notes = explain_memory(
            self.setup, request, result.trial.parts, self.limits, self.notify
        )
        if self.saver_trials is not None and savers is not None:
            why = self.saver_trials.notes(savers, schedule.micro_batches)
            inspection = dataclasses.replace(
                inspection,
                spec=dataclasses.replace(inspection.spec, savers=savers),
                notes=(*why, *inspection.notes),
            )
        holds_own = bool(inspection.spec.coupled) and not self.runner.of_all_ranks
        of_ranks = ranks_notes(device, holds_own=holds_own) if schedule.world_size > 1 else ()
        more_notes = (*self.setup.notes, *result.notes, *of_ranks, *explanation_notes)
        return Plan.of_schedule(
            schedule,
            kind="measured" if prediction is None else "predicted",
            multiple_of=inspection.multiple_of,
            parallel=inspection.parallel,
            mesh=request.options.mesh,
            grad_sync=grad_sync.way,
            grad_sync_peaks=grad_sync.peaks,
            largest_fit=result.largest_fit,
            capped=result.capped,
            stopped=result.stopped,
            limit_bytes=device.limit_bytes,
            peak_bytes=peak_bytes(result.trial),
            min_budget_bytes=None if prediction is None else prediction.min_budget_bytes,
            uncertainty_bytes=None if prediction is None else prediction.uncertainty_bytes,
            host_bytes=result.trial.host_bytes,
            device=device.describe(),
            environment=inspection.environment,
            workload=dataclasses.replace(
                inspection.workload,
                reference=self.setup.settings.source.name,
                overrides=self.setup.settings.options.overrides,
            ),
            spec=inspection.spec,
            trials=result.trials,
            warnings=all_warnings(inspection, schedule, (*result.warnings, *device.findings), prediction),
            notes=all_notes(inspection, schedule, request, result.largest_fit, prediction, more_notes),
            coupling=inspection.coupling,
            explanation=explanation,
            throughput=throughput,
        )

    def _forecast_and_search(self) -> SearchResult:
        """Find the largest micro-batch that fits, whose schedule ran.

        Nothing is forecast where so few sizes or trials are left that it would save none. Predicted trials use the same
        traces, so a limit on trials is no reason to leave it out there.

        Raises:
            UsageError, NotMeasuredError, DoesNotFitError: As `search`, or the schedule has parts too small to be
                trained: because a cap ended the search, because a limit did, or because larger ones do not fit.
        """
        request, least, ran = self.request, self.inspection.least_size, tuple(self.runner.trials)
        known = ran if self.saver_trials is None else ()
        before = len(ran) - len(known)
        forecast = Forecast()
        few_trials = request.max_trials is not None and request.max_trials < _MIN_TRIALS_TO_FORECAST
        few = (few_trials and not self.predicts) or request.cap < _MIN_SIZES_TO_FORECAST
        if not (few or self.runner.needs_whole_batch):
            with suppress(SearchStopped):
                has_limit = request.options.time_limit is not None and request.max_trials is None
                if self.predicts and has_limit and not known:
                    known = (self.runner.try_size(least),)  # The limit finds an answer, however long a forecast takes.
                forecast = self._forecast(self.limits.seconds_left())
        result = self._search(request.sizes(least), forecast, known)
        schedule = request.schedule(result.size)
        if schedule.smallest_part < least:
            raise too_small_error(schedule, result.size, least, stopped=result.stopped, capped=result.capped)
        return dataclasses.replace(result, trials=tuple(self.runner.trials[before:]), notes=forecast.notes)

    def _forecast(self, seconds_left: float | None) -> Forecast:
        self.notify(Doing("tracing"))
        if seconds_left is not None and not self.predicts:  # Predicted trials need the traces of a forecast.
            seconds_left *= _FORECAST_TIME_SHARE
        forecast = self.setup.device.forecast(limit_seconds=seconds_left, choose=self._choose_parts)
        for reason in forecast.alone:
            self.notify(TracedAlone(reason))
        return forecast

    def _choose_parts(self, trial: Callable[[int], Trial]) -> tuple[int, ...]:
        """Return the parts that would confirm the plan, as `devices.base.ChooseParts`."""
        found = search(
            lambda size, **_: dataclasses.replace(trial(size), fresh=True),
            self.request.sizes(self.inspection.least_size),
            limit_bytes=self.setup.device.limit_bytes,
            predict=lambda size: peak_bytes(trial(size)),
            answer=lambda size: self.request.schedule(size).micro_batch,
            needs=MemoryNeeds(predicted=True),
        )
        return self.request.schedule(found.size).trial_parts

    def _search(
        self, sizes: Sequence[int], forecast: Forecast | None = None, known: Sequence[Trial] = ()
    ) -> SearchResult:
        return search(
            self.runner.try_size,
            sizes,
            limit_bytes=self.setup.device.limit_bytes,
            needs=self._memory_needs,
            predict=None if forecast is None else forecast.peak_bytes,
            known=known,
            answer=lambda size: self.request.schedule(size).micro_batch,
            from_largest=self.runner.needs_whole_batch,
            probes_first=self.setup.device.grants_leftovers and not (self.limits.max_trials or self.limits.time_limit),
        )

    def _prove(self, size: int, larger: SearchResult) -> SearchResult:
        """Run the schedule of `size` from a clean state; search below it where that fails, although a larger ran."""
        before = len(self.runner.trials)
        trial = self.runner.try_size(size, fresh=True, unlimited=True)
        if trial.outcome == "error":
            raise trial_error(trial)
        if trial.ran:
            return dataclasses.replace(larger.proved_by(trial), size=size)
        below = [smaller for smaller in self.request.sizes(self.inspection.least_size) if smaller < size]
        if not below:
            raise does_not_fit_error(trial, self.setup.device.limit_bytes, self._memory_needs)
        found = self._search(below)
        refuted = refuted_by(trial, larger.largest_fit, predicted=self.predicts)
        return dataclasses.replace(
            found,
            capped=False,
            trials=(*larger.trials, *self.runner.trials[before:]),
            warnings=(*larger.warnings, refuted, *found.warnings),
            notes=larger.notes,
        )

    def _estimate_speeds(self, device: Predictor, sizes: Sequence[int]) -> Throughput:
        """Estimate the speed of updates in micro-batches of `sizes`; raise SearchStopped where the limit ends it."""
        try:
            cost = device.count_cost(limit_seconds=self.limits.seconds_left())
        except WorkloadError as error:  # Of the counter's: the trials ran.
            raise NotMeasuredError(error.message) from None
        schedules = [self.request.schedule(size).micro_batches for size in sizes]
        precision = self.inspection.workload.product_precision(self.inspection.spec)
        return estimate_throughput(cost, device.rates, schedules, device=device.name, precision=precision)

    @property
    def _memory_needs(self) -> MemoryNeeds:
        inspection = self.inspection
        in_lock_step = inspection.workload.whole_batch == "lockstep"
        return MemoryNeeds(
            least_bytes=inspection.workload.parameter_bytes or 0,
            update_bytes=inspection.update_bytes,
            resident_bytes=inspection.resident_bytes,
            update_samples=inspection.update_samples,
            sample_bytes=None if in_lock_step else inspection.sample_bytes,
            predicted=self.predicts,
            grants_leftovers=self.setup.device.grants_leftovers,
            parallel=inspection.parallel,
            of_command=bool(inspection.workload.command),
            holds_whole_batch=in_lock_step and self.setup.device.describe().kind == "cpu",
        )


def _use_savers(setup: PlanSetup, trials: SaverTrials, refuted: Collection[Words] = ()) -> Words:
    """Let the device use the savers that `trials` choose, and return them; its simulation ends before trials on it."""
    with nullcontext() if trials.device is setup.device else closing(trials.device):
        words = trials.choose(refuted)
    setup.device.use_savers(words)
    return words


def explain_memory(
    setup: PlanSetup, request: PlanRequest, parts: tuple[int, ...], limits: SearchLimits, notify: Listener
) -> tuple[Explanation | None, tuple[Message, ...]]:
    """Return the explanation of the memory of `parts`, if requested, and notes on what is missing.

    Whatever prevents it becomes a note, since the schedule is proved already. `notify` gets the whole report.
    """
    changes, curve = request.explain or request.report, request.picture or request.report
    if not (changes or curve) or not setup.device.explains:
        return None, ()
    notify(Doing("explaining"))
    try:
        seconds = limits.seconds_left()
        report = setup.device.explain(parts, limit_seconds=seconds, changes=changes, curve=curve)
    except SearchStopped as stopped:
        return None, (message("not_explained", error=f"{stopped} was used up"),)
    except KeyboardInterrupt:  # The proved schedule is worth more; a second Ctrl-C ends that too.
        return None, (message("not_explained", error="it was interrupted"),)
    except (WorkloadError, UsageError, NotMeasuredError) as error:
        return None, (message("not_explained", error=first_line(error.message)),)
    notify(Explained(report))
    return (report.explanation, report.notes) if request.explain else (None, ())
