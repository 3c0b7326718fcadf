"""`plan`: from a workload file and a target batch to a plan that was proved by trials."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from autoaccum.accumulation.schedule import Schedule, equal_parts_cost, even_parts, format_parts, make_schedule
from autoaccum.devices.base import Device, Inspection, Trial, TrialSettings
from autoaccum.errors import DoesNotFitError, NotMeasuredError, UsageError
from autoaccum.planning.device_choice import has_nvidia_gpu, make_device
from autoaccum.planning.events import Inspected, Listener, Loading, Scheduled, TrialFinished, TrialStarted
from autoaccum.planning.records import Plan
from autoaccum.planning.search import Need, SearchResult, does_not_fit, search, trial_error
from autoaccum.units import MemorySize, parse_size

_MOST_SAMPLES, _MOST_RANKS = 10_000_000, 100_000
_PRECISIONS = ("fp32", "bf16", "fp16")


def plan(
    workload: str | os.PathLike[str],
    *,
    target_batch: int,
    device: str = "auto",
    memory: str | MemorySize | None = None,
    reserve: str | MemorySize | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    world_size: int = 1,
    equal: bool = False,
    max_micro_batch: int | None = None,
    trial_limit: float = 600.0,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Plan:
    """Find out by trials how to run updates of `target_batch` samples in the memory there is.

    Args:
        workload: `model.py`, `model.py:name` or `package.module:name`.
        target_batch: Samples per update, over all ranks.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        memory: The budget: `10GiB`, `24GB`, or `80%` of the total; what is free otherwise.
        reserve: Kept free of it.
        precision: `fp32`, `bf16` or `fp16`, instead of the workload's.
        optimizer: A name of `torch.optim`, instead of the workload's.
        world_size: Ranks that share the target; the longest share decides.
        equal: Equal micro-batches only.
        max_micro_batch: Try no larger size, in samples.
        trial_limit: Seconds after which a trial is given up.
        on_event: Told of every step, with a record of `autoaccum.planning.events`.
        on_output: Given what the workload prints, line by line; stderr otherwise.

    Raises:
        UsageError: An argument cannot be honoured.
        WorkloadError: The workload is not usable as it stands.
        DoesNotFitError: Not even a micro-batch of 1 runs.
        NotMeasuredError: Trials could not be run to an answer.
    """
    request = Request(target_batch, world_size=world_size, equal=equal, max_micro_batch=max_micro_batch)
    settings = TrialSettings(
        reference=os.fspath(workload),
        share=request.share,
        precision=_check_precision(precision),
        optimizer=optimizer,
        trial_limit_seconds=_check_limit(trial_limit),
    )
    chosen = make_device(device, settings, memory=_size(memory), reserve=_size(reserve), on_output=on_output)
    with chosen:
        warnings = []
        if device == "auto" and has_nvidia_gpu():
            warnings.append("a GPU is there, but this version of autoaccum runs its trials on the CPU only")
        return plan_on(chosen, request, reference=settings.reference, on_event=on_event, warnings=warnings)


@dataclass(frozen=True)
class Request:
    """What is to be planned, checked as far as numbers go.

    Raises:
        UsageError: A number is not a whole one of at least 1, or beyond all use (a schedule lists all its parts), or
            equal parts do not divide the target.
    """

    target_batch: int
    world_size: int = 1
    equal: bool = False
    max_micro_batch: int | None = None

    def __post_init__(self) -> None:
        for what, number, most in (
            ("target batch", self.target_batch, _MOST_SAMPLES),
            ("world size", self.world_size, _MOST_RANKS),
        ):
            if isinstance(number, int) and number > most:
                raise UsageError(f"the {what} is beyond {most:,}", hint="take a smaller one")
        self.schedule(1 if self.max_micro_batch is None else self.max_micro_batch)

    @property
    def share(self) -> int:
        """Samples per update on the rank with the longest share."""
        return even_parts(self.target_batch, self.world_size)[0]

    @property
    def cap(self) -> int:
        """The largest size worth trying."""
        return min(self.share, self.max_micro_batch or self.share)

    def schedule(self, ceiling: int) -> Schedule:
        """How the target is cut when the largest size that fits is `ceiling`."""
        return make_schedule(self.target_batch, ceiling, world_size=self.world_size, equal=self.equal)


def plan_on(
    device: Device,
    request: Request,
    *,
    reference: str,
    on_event: Listener | None = None,
    warnings: list[str] | None = None,
) -> Plan:
    """Plan by trials on a device that is already there; closing it is the caller's.

    Raises:
        WorkloadError, DoesNotFitError, NotMeasuredError: As in `plan`.
    """
    runner = _Runner(device, request, on_event or (lambda event: None))
    runner.tell(Loading(reference))
    inspection = device.inspect()
    runner.tell(Inspected(inspection, device.name, device.limit_bytes, request.cap))
    result = search(
        runner.try_size,
        request.cap,
        limit_bytes=device.limit_bytes,
        need=_need(inspection),
        least_size=inspection.least_size,
        fresh_trial=partial(runner.try_size, fresh=True),
    )
    schedule, proof, doubts = _confirm(runner, result, inspection)
    cautions = inspection.warnings
    if schedule.iter_size > 1:
        cautions += inspection.accumulation_warnings
    largest_fit = result.largest_fit
    if doubts:
        largest_fit = max(t.micro_batch for t in runner.trials if t.ran and t.micro_batch < runner.refuted)
    return Plan(
        kind="measured",
        target_batch=schedule.target_batch,
        micro_batch=schedule.micro_batch,
        iter_size=schedule.iter_size,
        micro_batches=schedule.micro_batches,
        world_size=schedule.world_size,
        ranks=schedule.ranks if schedule.world_size > 1 else None,
        largest_fit=largest_fit,
        capped=result.capped and not doubts,
        limit_bytes=device.limit_bytes,
        peak_bytes=proof.peak_allocated_bytes if proof.peak_reserved_bytes is None else proof.peak_reserved_bytes,
        device=device.describe(),
        environment=inspection.environment,
        workload=_describe(inspection, reference),
        trials=tuple(runner.trials),
        warnings=tuple(dict.fromkeys((*(warnings or ()), *cautions, *result.warnings, *doubts))),
        notes=tuple(_notes(schedule, request, largest_fit, inspection)),
    )


class _Runner:
    """Runs trials, keeps them, and tells of them."""

    def __init__(self, device: Device, request: Request, tell: Listener) -> None:
        self.device, self.request, self.tell = device, request, tell
        self.trials: list[Trial] = []
        self.refuted = request.share + 1

    def try_size(self, size: int, *, fresh: bool = False) -> Trial:
        # The whole share is one micro-batch per update: nothing accumulates then.
        return self._run((size,) if size == self.request.share else (size, size), fresh=fresh)

    def confirm(self, schedule: Schedule) -> Trial:
        """Run the schedule's largest and smallest part from a clean state, unless the last trial did just that."""
        parts = (schedule.micro_batch, schedule.smallest_part) if schedule.iter_size > 1 else (schedule.micro_batch,)
        last = self.trials[-1]
        if last.fresh and last.outcome == "ok" and last.parts == parts:
            return last
        return self._run(parts, fresh=True, confirming=True)

    def _run(self, parts: tuple[int, ...], *, fresh: bool, confirming: bool = False) -> Trial:
        number = len(self.trials) + 1
        self.tell(TrialStarted(number, parts, confirming))
        trial = self.device.trial(parts, fresh=fresh)
        self.trials.append(trial)
        self.tell(TrialFinished(number, trial, confirming))
        return trial


def _confirm(runner: _Runner, result: SearchResult, inspection: Inspection) -> tuple[Schedule, Trial, tuple[str, ...]]:
    """Prove a schedule in a fresh process, going down to the next one while it fails; with sentences on what failed."""
    accepted = {t.outcome for t in result.trials if t.micro_batch == result.largest_fit and t.ran}
    ceiling = result.largest_fit
    doubts: list[str] = []
    while True:
        schedule = runner.request.schedule(ceiling)
        _check_least(schedule, ceiling, inspection.least_size)
        runner.tell(Scheduled(schedule, ceiling))
        trial = runner.confirm(schedule)
        if trial.outcome == "error":
            raise trial_error(trial)
        if trial.outcome == "ok" or trial.outcome in accepted:
            return schedule, trial, tuple(doubts)
        doubts.append(
            f"{format_parts(schedule.micro_batches)} did not run again from a clean state ({trial.outcome}), although "
            f"{ceiling} ran before: memory differs from one run to the next, so keep some headroom (--reserve)"
        )
        runner.refuted = schedule.micro_batch
        if schedule.micro_batch == inspection.least_size:
            if trial.outcome == "oom" and not trial.certain:
                raise NotMeasuredError(
                    f"micro-batch {trial.micro_batch} ran and failed: {trial.message or 'no message'}"
                )
            raise does_not_fit(trial, runner.device.limit_bytes, _need(inspection))
        ceiling = schedule.micro_batch - 1


def _need(inspection: Inspection) -> Need:
    return Need(
        least_bytes=inspection.parameter_bytes,
        update_bytes=inspection.update_bytes,
        update_samples=inspection.update_samples,
    )


def _check_least(schedule: Schedule, ceiling: int, least_size: int) -> None:
    """Refuse parts too small to be trained; fewer parts do not fit, and more would be smaller still."""
    if schedule.smallest_part < least_size:
        raise DoesNotFitError(
            f"{schedule.target_batch} samples in micro-batches of at most {ceiling} leave one of "
            f"{schedule.smallest_part}, and this model's BatchNorm needs {least_size}",
            hint=f"take a target batch that micro-batches of {least_size} to {ceiling} add up to, or more memory",
        )


def _describe(inspection: Inspection, reference: str) -> dict[str, str | int]:
    return {
        "reference": reference,
        "name": inspection.name,
        "digest": inspection.digest,
        "model": inspection.model,
        "parameters": inspection.parameters,
        "parameter_bytes": inspection.parameter_bytes,
        "precision": inspection.precision,
        "optimizer": inspection.optimizer,
        "loss": inspection.loss,
        "reduction": inspection.reduction,
        "weight": inspection.weight,
    }


def _notes(schedule: Schedule, request: Request, ceiling: int, inspection: Inspection) -> list[str]:
    notes = [learning_rate_note(schedule, inspection.reduction)]
    if request.equal and (cost := equal_parts_cost(schedule, ceiling)):
        notes.append(cost)
    idle = sum(1 for parts in schedule.ranks if not sum(parts))
    if idle:
        notes.append(
            f"{idle} of {schedule.world_size} ranks have no samples of their own: the target is smaller than the world"
        )
    return notes


def learning_rate_note(schedule: Schedule, reduction: str) -> str:
    """What happens to the learning rate, in one sentence: nothing, since the gradient is the full batch's."""
    rate = f"the learning rate stays what it is for a batch of {schedule.target_batch}"
    if schedule.iter_size == 1:
        return f"{rate}: nothing is accumulated, one micro-batch is the update"
    if reduction == "sum":
        return f"{rate}: the loss is a sum, so its parts are added and not divided"
    return f"{rate}; an undivided loss would act as {schedule.iter_size} times the rate under plain SGD"


def _check_precision(precision: str | None) -> str | None:
    if precision is not None and precision not in _PRECISIONS:
        raise UsageError(f"there is no precision {precision!r}", hint=f"take {', '.join(_PRECISIONS)}")
    return precision


def _check_limit(seconds: float) -> float:
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds <= 0:
        raise UsageError(f"the trial limit is {seconds!r}", hint="give the seconds a trial may take, more than 0")
    return float(seconds)


def _size(size: str | MemorySize | None) -> MemorySize | None:
    return parse_size(size) if isinstance(size, str) else size
