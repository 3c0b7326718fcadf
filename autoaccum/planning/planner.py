"""`plan`: from a workload and a target batch to a plan that was proved by trials."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum.accumulation.schedule import Schedule, format_parts
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.explanation import Explaining, Explanation, Foreseeing, Foresight, Predicting, Prediction
from autoaccum.errors import (
    AutoaccumError,
    DoesNotFitError,
    NotMeasuredError,
    UsageError,
    WorkloadError,
    first_line,
)
from autoaccum.planning.extrapolation import Predict
from autoaccum.planning.plan import Plan
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
    Need,
    all_notes,
    all_warnings,
    describe_workload,
    does_not_fit,
    peak_bytes,
    trial_error,
)
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.search import SearchResult, SearchStopped, search
from autoaccum.planning.trial_runner import Allowance, Runner, find_least

_SIZES_FOR_FORESIGHT, _TRIALS_FOR_FORESIGHT = 6, 3
_FORESIGHT_SHARE = 0.25
"""Of a limit on time."""

if TYPE_CHECKING:
    from autoaccum.workload.spec import Workload


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
        request: What the plan is to do.
        live: Live objects by the names of `autoaccum.plan`'s arguments; those not given are None or left out.
        on_event: Called with each record of `autoaccum.planning.plan_events`.
        on_output: Receives each line the workload prints in processes of its own; stderr otherwise.

    Raises:
        UsageError, WorkloadError, DoesNotFitError, NotMeasuredError: As `autoaccum.plan`.
    """
    started = time.monotonic()
    setup = make_setup(workload, request, live=live, on_output=on_output)
    with setup.device:
        return plan_on_device(setup, request, on_event=on_event, began=started)


def plan_on_device(
    setup: PlanSetup, request: PlanRequest, *, on_event: Listener | None = None, began: float | None = None
) -> Plan:
    """Plan by trials of a setup that is already there; closing its device is the caller's.

    Args:
        setup: What is tried, and where.
        request: What is asked for.
        on_event: As in `plan`.
        began: When the limit on time began to count, by `time.monotonic`; now when None.

    Raises:
        UsageError, WorkloadError, DoesNotFitError, NotMeasuredError: As in `plan`.
    """
    check_explaining(setup, request)
    return _Planner(setup, request, on_event or (lambda event: None), began).plan()


@dataclass(frozen=True)
class _Proof:
    """A schedule and the trial that proved it.

    Attributes:
        schedule: What was proved.
        proof: Its trial.
        largest_fit: The largest size that ran, below any that the confirmation refuted.
        doubts: Sentences on schedules that did not run again.
    """

    schedule: Schedule
    proof: Trial
    largest_fit: int
    doubts: tuple[str, ...]


class _Refuted(Exception):
    """A schedule was traced and does not fit, although its ceiling does by traces of other sizes; its text says so."""


class _Planner:
    """Inspects the workload, searches, proves the schedule, and tells all of it in a plan."""

    def __init__(self, setup: PlanSetup, request: PlanRequest, tell: Listener, began: float | None) -> None:
        self._setup, self._device, self._tell = setup, setup.device, tell
        self._predicts = isinstance(setup.device, Predicting)
        self._allowance = Allowance(request.max_trials, request.options.time_limit, began=began)
        self._inspection, seconds = self._inspect(request)
        multiple_of = self._inspection.multiple_of
        if multiple_of != request.each:
            options = dataclasses.replace(request.options, multiple_of=multiple_of)
            request = dataclasses.replace(request, options=options)
        self._request = request
        self._runner = Runner(self._device, request, tell, self._allowance)
        if not self._predicts:  # One that predicts starts no process for its confirmation.
            self._runner.proof_seconds = seconds

    def plan(self) -> Plan:
        """The plan."""
        inspection, device = self._inspection, self._device
        limit_bytes = device.limit_bytes
        self._tell(Inspected(inspection, device.name, limit_bytes, self._request.cap, self._predicts))
        foresight = self._foresee()
        result, found, refuted = self._search_and_prove(foresight)
        schedule, proof = found.schedule, found.proof
        prediction = device.predict(proof.parts) if isinstance(device, Predicting) else None
        least_bytes, ended = self._least(prediction, proof)
        explanation, said = explain_proof(self._setup, self._request, proof.parts, self._allowance, self._tell)
        of_sizes = (*found.doubts, *refuted, *result.warnings)
        further = (*foresight.notes, *ended, *said)
        return Plan.of_schedule(
            schedule,
            kind="measured" if prediction is None else "predicted",
            multiple_of=inspection.multiple_of,
            largest_fit=found.largest_fit,
            capped=result.capped and not found.doubts,
            stopped=result.stopped,
            limit_bytes=limit_bytes,
            peak_bytes=peak_bytes(proof),
            least_bytes=least_bytes,
            band_bytes=None if prediction is None else prediction.band_bytes,
            device=device.describe(),
            environment=inspection.environment,
            workload=describe_workload(inspection, self._setup.reference),
            trials=tuple(self._runner.trials),
            warnings=all_warnings(inspection, schedule, of_sizes, prediction),
            notes=all_notes(inspection, schedule, self._request, found.largest_fit, prediction, further),
            coupling=inspection.coupling,
            explanation=explanation,
        )

    def _inspect(self, request: PlanRequest) -> tuple[Inspection, float]:
        """What is known before any trial, and the seconds it took, most of which are the start of a process."""
        self._tell(Loading(self._setup.reference))
        asked = time.monotonic()
        inspection = self._device.inspect(limit_seconds=request.load_limit_seconds)
        return inspection, time.monotonic() - asked

    def _foresee(self) -> Foresight:
        """What peaks to expect, unless so few sizes are worth trying that the first trials tell as much.

        Where trials are predicted too, they need the same traces, so that few of them are no reason to do without.
        """
        device, request = self._device, self._request
        few_trials = request.max_trials is not None and request.max_trials < _TRIALS_FOR_FORESIGHT
        if few_trials and not self._predicts:
            return Foresight()
        if request.cap < _SIZES_FOR_FORESIGHT or not isinstance(device, Foreseeing):
            return Foresight()
        self._tell(Tracing())
        limit = request.options.time_limit
        return device.foresee(limit_seconds=None if limit is None else limit * _FORESIGHT_SHARE)

    def _search_and_prove(self, foresight: Foresight) -> tuple[SearchResult, _Proof, tuple[str, ...]]:
        """The largest size, its proved schedule, and what a first proof refuted.

        Where a trace of the schedule refutes what followed from traces of other sizes, it is searched once more; there
        is no limit on time that could end that too early.
        """
        again = self._predicts and not self._request.limited
        result = self._search(foresight.peak_bytes)
        try:
            return result, self._prove(result, search_again=again), ()
        except _Refuted as doubt:
            result = self._search(None)
            return result, self._prove(result), (str(doubt),)

    def _search(self, predict: Predict | None) -> SearchResult:
        return search(
            self._runner.try_size,
            self._request.cap,
            limit_bytes=self._device.limit_bytes,
            need=self._need,
            least_size=self._inspection.least_size,
            multiple_of=self._inspection.multiple_of,
            fresh_trial=self._runner.try_afresh if self._setup.isolated else None,
            predict=predict,
        )

    def _prove(self, result: SearchResult, *, search_again: bool = False) -> _Proof:
        """Prove a schedule in a fresh process, going down to the next one while it fails.

        Raises:
            _Refuted: The first one fails, and the caller wants to `search_again` in place of going down.
            WorkloadError, NotMeasuredError: Its trial failed by the workload's fault, or by the measurement's.
            DoesNotFitError: No schedule runs, or only one with parts too small to be trained. Such parts are a
                UsageError where the search was told to go no further, and a NotMeasuredError where a limit stopped it.
        """
        accepted = {t.outcome for t in result.trials if t.micro_batch == result.largest_fit and t.ran}
        ceiling, largest_fit = result.largest_fit, result.largest_fit
        least_size = self._inspection.least_size
        doubts: list[str] = []
        while True:
            schedule = self._request.schedule(ceiling)
            if schedule.smallest_part < least_size:
                raise _too_small(schedule, ceiling, least_size, result)
            self._tell(Scheduled(schedule, ceiling))
            trial = self._runner.confirm(schedule)
            if trial.outcome == "error":
                raise trial_error(trial)
            if trial.outcome == "ok" or trial.outcome in accepted:
                return _Proof(schedule, trial, max(largest_fit, trial.micro_batch), tuple(doubts))
            doubts.append(self._doubt(schedule, ceiling, trial))
            if search_again:
                raise _Refuted(doubts[0])
            if schedule.micro_batch == least_size:
                if trial.outcome == "oom" and not trial.certain:
                    raise NotMeasuredError(
                        f"micro-batch {trial.micro_batch} ran and failed: {trial.message or 'no message'}"
                    )
                raise does_not_fit(trial, self._device.limit_bytes, self._need)
            ceiling = schedule.micro_batch - 1
            ran = (t.micro_batch for t in self._runner.trials if t.ran and t.micro_batch <= ceiling)
            largest_fit = max(ran, default=0)

    @property
    def _need(self) -> Need:
        """What is known of the memory any size needs."""
        seen = self._inspection
        return Need(
            least_bytes=seen.parameter_bytes,
            update_bytes=seen.update_bytes,
            update_samples=seen.update_samples,
            sample_bytes=seen.sample_bytes,
            predicted=self._predicts,
        )

    def _doubt(self, schedule: Schedule, ceiling: int, trial: Trial) -> str:
        """The sentence on a schedule whose trial failed, or was tight, although its ceiling was not."""
        said = f"{format_parts(schedule.micro_batches)} {'{}'} ({trial.outcome}), although {ceiling} "
        if self._predicts:
            return said.format("was traced and does not fit") + "does by traces of other sizes"
        return (
            said.format("did not run again from a clean state")
            + "ran before: memory differs from one run to the next, so keep some headroom (--reserve)"
        )

    def _least(self, prediction: Prediction | None, proof: Trial) -> tuple[int | None, tuple[str, ...]]:
        """The least budget where it is known or asked for, and a sentence if the search for it ended early."""
        if prediction is not None:
            return prediction.least_bytes, ()
        if not self._request.least:
            return None, ()
        found, ended = find_least(
            lambda budget: self._runner.try_budget(proof.parts, budget),
            limit_bytes=self._device.limit_bytes,
            peak_bytes=peak_bytes(proof),
        )
        return found, () if ended is None else (ended,)


def _too_small(schedule: Schedule, ceiling: int, least_size: int, result: SearchResult) -> AutoaccumError:
    """The error for parts too small to be trained; fewer parts do not fit, and more would be smaller still."""
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


def check_explaining(setup: PlanSetup, request: PlanRequest) -> None:
    """Refuse now what could not be explained at the end.

    Raises:
        UsageError: An explanation is asked for, and the device has none.
    """
    device = setup.device
    if not request.explain or isinstance(device, Explaining):
        return
    if setup.isolated or isinstance(device, Predicting):
        raise UsageError(
            f"explain (--explain) tells where the memory of a card goes, and trials run on the {device.name.upper()}",
            hint="predict for a card, which need not be here, by gpu=NAME (--gpu NAME; see `autoaccum gpus`)",
        )
    raise UsageError(
        "explain tells where the memory of a card goes, and that of live objects is not told apart",
        hint="predict for a card, which need not be here: gpu=NAME",
    )


def explain_proof(
    setup: PlanSetup, request: PlanRequest, parts: tuple[int, ...], allowance: Allowance, tell: Listener
) -> tuple[Explanation | None, tuple[str, ...]]:
    """What the plan keeps of where the memory of `parts` goes, and sentences where that is not all; listeners get all.

    Args:
        setup: What was tried, and where.
        request: What is asked for.
        parts: Of the trial that proved the schedule.
        allowance: What is left of a limit on time.
        tell: Is told the whole account, for pictures.
    """
    device = setup.device
    if not (request.explain or request.picture) or not isinstance(device, Explaining):
        return None, ()
    tell(ExplanationStarted())
    try:
        left = allowance.seconds_left(None, 0.0)
        account = device.explain(parts, changes=request.explain, curve=request.picture, limit_seconds=left)
    except SearchStopped as stopped:
        return None, (f"where the memory goes was not asked: {stopped} was over",)
    except KeyboardInterrupt:  # What was proved is worth more; pressed again, it ends that too.
        return None, ("where the memory goes is not known (it was interrupted)",)
    except (WorkloadError, UsageError, NotMeasuredError) as error:
        return None, (f"where the memory goes is not known ({first_line(error.message)})",)
    tell(Explained(account))
    return (account.explanation, account.notes) if request.explain else (None, ())
