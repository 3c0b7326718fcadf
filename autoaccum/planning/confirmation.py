"""From the largest size that ran to a schedule that was proved from a clean state, and where its memory goes."""

from __future__ import annotations

from dataclasses import dataclass

from autoaccum.accumulation.schedule import Schedule, format_parts
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.explanation import Explaining, Explanation, Predicting
from autoaccum.errors import (
    AutoaccumError,
    DoesNotFitError,
    NotMeasuredError,
    UsageError,
    WorkloadError,
    first_line,
)
from autoaccum.planning.events import Explained, ExplanationStarted, Listener, Scheduled
from autoaccum.planning.request import Request
from autoaccum.planning.runner import Allowance, Runner
from autoaccum.planning.search import SearchResult, SearchStopped
from autoaccum.planning.subjects import Subject
from autoaccum.planning.verdicts import Need, does_not_fit, trial_error


@dataclass(frozen=True)
class Confirmation:
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


class Refuted(Exception):
    """A schedule was traced and does not fit, although its ceiling does by traces of other sizes; its text says so."""


def confirm(
    runner: Runner,
    request: Request,
    result: SearchResult,
    inspection: Inspection,
    limit_bytes: int,
    tell: Listener,
    *,
    predicted: bool = False,
    search_again: bool = False,
) -> Confirmation:
    """Prove a schedule in a fresh process, going down to the next one while it fails.

    Raises:
        Refuted: The first one fails, and the caller wants to `search_again` in place of going down.
        WorkloadError, NotMeasuredError: Its trial failed by the workload's fault, or by the measurement's.
        DoesNotFitError: No schedule runs, or only one with parts too small to be trained. Such parts are a UsageError
            where the search was told to go no further, and a NotMeasuredError where a limit stopped it.
    """
    accepted = {t.outcome for t in result.trials if t.micro_batch == result.largest_fit and t.ran}
    ceiling, largest_fit = result.largest_fit, result.largest_fit
    doubts: list[str] = []
    while True:
        schedule = request.schedule(ceiling)
        if schedule.smallest_part < inspection.least_size:
            raise _too_small(schedule, ceiling, inspection.least_size, result)
        tell(Scheduled(schedule, ceiling))
        trial = runner.confirm(schedule)
        if trial.outcome == "error":
            raise trial_error(trial)
        if trial.outcome == "ok" or trial.outcome in accepted:
            return Confirmation(schedule, trial, max(largest_fit, trial.micro_batch), tuple(doubts))
        doubts.append(_doubt(schedule, ceiling, trial, predicted))
        if search_again:
            raise Refuted(doubts[0])
        if schedule.micro_batch == inspection.least_size:
            if trial.outcome == "oom" and not trial.certain:
                raise NotMeasuredError(
                    f"micro-batch {trial.micro_batch} ran and failed: {trial.message or 'no message'}"
                )
            raise does_not_fit(trial, limit_bytes, inspection_need(inspection, predicted))
        ceiling = schedule.micro_batch - 1
        largest_fit = max((t.micro_batch for t in runner.trials if t.ran and t.micro_batch <= ceiling), default=0)


def inspection_need(inspection: Inspection, predicted: bool = False) -> Need:
    """What an inspection tells of the memory any size needs."""
    return Need(
        least_bytes=inspection.parameter_bytes,
        update_bytes=inspection.update_bytes,
        update_samples=inspection.update_samples,
        sample_bytes=inspection.sample_bytes,
        predicted=predicted,
    )


def _doubt(schedule: Schedule, ceiling: int, trial: Trial, predicted: bool) -> str:
    """The sentence on a schedule whose trial failed, or was tight, although its ceiling was not."""
    parts = format_parts(schedule.micro_batches)
    if predicted:
        return (
            f"{parts} was traced and does not fit ({trial.outcome}), although {ceiling} does by traces of other sizes"
        )
    return (
        f"{parts} did not run again from a clean state ({trial.outcome}), although {ceiling} ran before: memory "
        "differs from one run to the next, so keep some headroom (--reserve)"
    )


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


def check_explaining(subject: Subject, request: Request) -> None:
    """Refuse now what could not be explained at the end.

    Raises:
        UsageError: An explanation is asked for, and the device has none.
    """
    device = subject.device
    if not request.explain or isinstance(device, Explaining):
        return
    if subject.isolated or isinstance(device, Predicting):
        raise UsageError(
            f"explain (--explain) tells where the memory of a card goes, and trials run on the {device.name.upper()}",
            hint="predict for a card, which need not be here, by gpu=NAME (--gpu NAME; see `autoaccum gpus`)",
        )
    raise UsageError(
        "explain tells where the memory of a card goes, and that of live objects is not told apart",
        hint="predict for a card, which need not be here: gpu=NAME",
    )


def explain_proof(
    subject: Subject, request: Request, parts: tuple[int, ...], allowance: Allowance, tell: Listener
) -> tuple[Explanation | None, tuple[str, ...]]:
    """What the plan keeps of where the memory of `parts` goes, and sentences where that is not all; listeners get all.

    Args:
        subject: What was tried, and where.
        request: What is asked for.
        parts: Of the trial that proved the schedule.
        allowance: What is left of a limit on time.
        tell: Is told the whole account, for pictures.
    """
    device = subject.device
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
