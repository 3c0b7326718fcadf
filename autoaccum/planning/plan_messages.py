"""What a plan has to say: errors of failed trials, warnings and notes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoaccum.accumulation.schedule import Schedule, fewer_parts, nearby_target
from autoaccum.devices.base import Device, Inspection, Prediction, Trial
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.messages import Message, message
from autoaccum.options import Parallel
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.units import format_bytes

_LESS_MEMORY = "a smaller model, --precision bf16, activation checkpointing, {}or more memory"
_OF_RANKS: dict[Parallel | None, str] = {"ddp": "--parallel fsdp2, ", "fsdp2": "more ranks (--world-size), "}


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """The known parts of a workload's memory before any trial.

    Attributes:
        quantity: What has sizes.
        curved: Whether memory is no line over the sizes, all at one distance: they are no micro-batches.
        least_bytes: The bytes that every size needs: the parameters.
        update_bytes: The peak of an update of `update_samples` samples without a memory limit; None: not measured.
        resident_bytes: The bytes of parameters, gradients and optimizer state; None: not known.
        update_samples: The samples of that update.
        sample_bytes: The bytes of one sample's activations; None: not measured.
        predicted: Whether trials are predicted: then a trial that does not fit has a peak too.
        grants_leftovers: As of `Device`.
        parallel: How simulated ranks train one model; None: there is one, or trials are real.
        of_command: Whether a command is planned, whose options are its own.
        holds_whole_batch: Whether every size takes the memory of the whole batch, in lock step on the CPU.
    """

    quantity: str = "micro-batch"
    curved: bool = False
    least_bytes: int = 0
    update_bytes: int | None = None
    resident_bytes: int | None = None
    update_samples: int = 0
    sample_bytes: int | None = None
    predicted: bool = False
    grants_leftovers: bool = False
    parallel: Parallel | None = None
    of_command: bool = False
    holds_whole_batch: bool = False


def trial_error(trial: Trial, *, of_command: bool = False) -> AutoaccumError:
    """Return the error of a trial whose outcome is `error`: a WorkloadError, or a NotMeasuredError.

    Of a workload, the inspection has found its `multiple_of`; of a command nobody has.
    """
    text = trial.message or f"micro-batch {trial.micro_batch} failed without a message"
    if trial.fault == "user":
        needs_two = "give --multiple-of 2 if it needs an even number of samples, or two"
        hint = needs_two if of_command and trial.micro_batch == 1 else None
        return WorkloadError(text, hint=hint, user_traceback=trial.traceback)
    return NotMeasuredError(text)


def refuted_by(trial: Trial, larger: int, *, predicted: bool) -> Message:
    """Return the warning about parts whose trial failed, or was tight, although `larger` ones had run."""
    return message("refuted", parts=list(trial.parts), outcome=trial.outcome, larger=larger, predicted=predicted)


def too_small_error(
    schedule: Schedule, ceiling: int, least_size: int, *, stopped: str | None, capped: bool
) -> AutoaccumError:
    """Return the error for parts too small to be trained: fewer parts do not fit, and more would be smaller still."""
    message = (
        f"{schedule.target_batch} samples in micro-batches of at most {ceiling} leave one of "
        f"{schedule.smallest_part}, and this model's BatchNorm needs {least_size}"
    )
    hint = f"take a target batch that micro-batches of {least_size} to {ceiling} add up to"
    if stopped is not None:
        return NotMeasuredError(message, hint=f"{hint}, or allow the search more {stopped}")
    if capped:
        return UsageError(message, hint=f"{hint}, or allow larger ones")
    return DoesNotFitError(message, hint=f"{hint}, or more memory")


def does_not_fit_error(trial: Trial, limit_bytes: int, needs: MemoryNeeds | None = None) -> DoesNotFitError:
    """Return the error of the smallest trial, which ran out of memory: bytes needed, bytes available, what to do.

    A real trial that failed has no peak: then the bytes held, the parameters and an unlimited update are bounds.
    """
    needs = needs or MemoryNeeds()
    held = peak_bytes(trial)
    known = max(held or 0, needs.least_bytes)
    subject = f"{needs.quantity} {trial.micro_batch}"
    hint = f"take {_LESS_MEMORY.format(_OF_RANKS.get(needs.parallel, ''))}"
    if needs.of_command:
        hint = "take a smaller model, half precision, activation checkpointing, or more memory"
    elif trial.phase == "batch":
        hint = "a trial holds the effective batch: take a smaller --target-batch, smaller samples, or more memory"
    elif trial.phase == "evaluation":
        subject = f"the evaluation after an update of {subject}"
        hint = "take a smaller evaluation_batch (--evaluation-batch), or more memory"
    if needs.predicted and held:
        reason = f"it would take {format_bytes(held)} with no limit"
    elif known > limit_bytes:
        reason = f"it needs at least {format_bytes(known)}"
    elif trial.phase not in ("batch", "evaluation") and (needs.update_bytes or 0) > limit_bytes:
        reason = f"an update of micro-batch {needs.update_samples} takes {format_bytes(needs.update_bytes or 0)}"
    else:
        reason = f"it ran out of memory in {trial.phase}" if trial.phase else "it ran out of memory"
    message = f"{subject} does not fit: {reason}, {format_bytes(limit_bytes)} are available"
    if needs.holds_whole_batch:
        message += "; in lock step the CPU keeps what backward needs of the whole batch"
        hint = 'take a smaller target batch, batchnorm="running" or "frozen", or more memory'
    return DoesNotFitError(message, hint=hint)


def uncertain_oom_error(trial: Trial, needs: MemoryNeeds) -> NotMeasuredError:
    """Return the error of a failure that may be a bug, where no smaller size has confirmed it as out of memory."""
    return NotMeasuredError(
        f"{needs.quantity} {trial.micro_batch} failed with a message that may mean out of memory or a bug, and no "
        f"smaller size ran in a fresh process: {trial.message or 'no message'}"
    )


def peak_bytes(trial: Trial) -> int | None:
    """Return the peak that counts against a limit: reserved where it is known, else allocated; None: not measured."""
    return trial.peak_allocated_bytes if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes


def all_warnings(
    inspection: Inspection, schedule: Schedule, of_sizes: Iterable[Message], prediction: Prediction | None
) -> tuple[Message, ...]:
    """Return every warning of a plan once, the most severe first, since only the first are shown.

    The order: what makes the gradient differ from the full batch's (`warnings` of the inspection and the prediction),
    what may keep the plan from running (`of_sizes` that did not run as expected), and what makes the measurement less
    reliable (`cautions` of the inspection).
    """
    of_parts = inspection.accumulation_warnings if schedule.iter_size > 1 else ()
    of_prediction = () if prediction is None else prediction.warnings
    return tuple(dict.fromkeys((*inspection.warnings, *of_parts, *of_prediction, *of_sizes, *inspection.cautions)))


def ranks_notes(device: Device, *, holds_own: bool) -> list[Message]:
    """Return what several ranks take and trials did not.

    With `holds_own`, trials held the outputs of one rank, where each will hold those of all for a coupled loss.
    """
    notes = [message("nccl_memory")] if device.describe().kind == "cuda" else []
    return [*notes, message("outputs_of_ranks")] if holds_own else notes


def all_notes(
    inspection: Inspection,
    schedule: Schedule,
    request: PlanRequest,
    largest_fit: int,
    prediction: Prediction | None,
    more: Iterable[Message],
) -> tuple[Message, ...]:
    """Return every note of a plan, the most important first, since only the first are shown."""
    facts = inspection.workload
    notes = list[Message]()
    if facts.command and (nearby := nearby_target(schedule, request.cap, request.multiple_of)):
        sizes = {"micro_batch": schedule.micro_batch, "above": nearby[0]}
        notes.append(message("nearby_target", target_batch=schedule.target_batch, **sizes, nearby=nearby[1]))
    of_prediction = () if prediction is None else prediction.notes
    if inspection.coupling is None:
        notes += [message("not_verified")] if schedule.iter_size > 1 else []
        notes += [message("weight_assumed", divisor=facts.weight)] if facts.assumes_weight else []
    notes += of_prediction[:1]
    notes += inspection.notes
    if idle := sum(1 for parts in schedule.ranks if not sum(parts)):
        notes.append(message("idle_ranks", idle=idle, world_size=schedule.world_size))
    uneven = None if facts.command else fewer_parts(schedule, largest_fit, request.multiple_of)
    if request.options.equal and uneven is not None:
        samples = sum(schedule.micro_batches)
        notes.append(
            message(
                "equal_parts",
                samples=samples,
                iter_size=schedule.iter_size,
                uneven=list(uneven.micro_batches),
                world_size=schedule.world_size,
            )
        )
    if facts.modules:
        notes.append(message("modules_beside", sizes=dict(facts.modules)))
    rate = message(
        "learning_rate",
        target_batch=schedule.target_batch,
        iter_size=schedule.iter_size,
        reduction=None if facts.command else facts.reduction,
    )
    return (*notes, rate, *of_prediction[1:], *more)
