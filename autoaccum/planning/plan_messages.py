"""The sentences of a plan: errors of failed trials, warnings and notes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from autoaccum.accumulation.schedule import Schedule, equal_parts_cost, format_parts
from autoaccum.devices.base import Device, Inspection, Prediction, Trial
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.options import Parallel
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.units import format_bytes

_LESS_MEMORY = "a smaller model, --precision bf16, activation checkpointing, {}or more memory"
_OF_RANKS: dict[Parallel | None, str] = {"ddp": "--parallel fsdp2, ", "fsdp2": "more ranks (--world-size), "}


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """The known parts of a workload's memory before any trial.

    Attributes:
        least_bytes: The bytes that every size needs: the parameters.
        update_bytes: The peak of an update of `update_samples` samples without a memory limit; None: not measured.
        update_samples: The samples of that update.
        sample_bytes: The bytes of one sample's activations; None: not measured.
        predicted: Whether trials are predicted: then a trial that does not fit has a peak too.
        parallel: How simulated ranks train one model; None: there is one, or trials are real.
        holds_whole_batch: Whether every size takes the memory of the whole batch, in lock step on the CPU.
    """

    least_bytes: int = 0
    update_bytes: int | None = None
    update_samples: int = 0
    sample_bytes: int | None = None
    predicted: bool = False
    parallel: Parallel | None = None
    holds_whole_batch: bool = False


def trial_error(trial: Trial) -> AutoaccumError:
    """Return the error of a trial whose outcome is `error`: a WorkloadError, or a NotMeasuredError."""
    where = f" in {trial.phase}" if trial.phase else ""
    message = trial.message or "no message"
    if not re.match(rf"micro-batch {trial.micro_batch}\b", message):
        message = f"micro-batch {trial.micro_batch} failed{where}: {message}"
    if trial.fault == "user":
        return WorkloadError(message, user_traceback=trial.traceback)
    return NotMeasuredError(message)


def refuted_warning(trial: Trial, larger: int, *, predicted: bool) -> str:
    """Return the warning about parts whose trial failed, or was tight, although `larger` ones had run."""
    tried = f"{format_parts(trial.parts)} {'{}'} ({trial.outcome}), although {larger} "
    if predicted:
        return tried.format("was traced and does not fit") + "does by traces of other sizes"
    return (
        tried.format("did not run again from a clean state")
        + "ran before: memory differs from one run to the next, so keep some headroom (--reserve)"
    )


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
    subject = f"micro-batch {trial.micro_batch}"
    hint = f"take {_LESS_MEMORY.format(_OF_RANKS.get(needs.parallel, ''))}"
    if trial.phase == "batch":
        hint = "a trial holds the effective batch: take a smaller --target-batch, smaller samples, or more memory"
    if trial.phase == "evaluation":
        subject = f"the evaluation after an update of {subject}"
        hint = "take a smaller evaluation_batch (--evaluation-batch), or more memory"
    if needs.predicted and held:
        reason = f"it would take {format_bytes(held)} where nothing limits it"
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


def uncertain_oom_error(trial: Trial) -> NotMeasuredError:
    """Return the error of a failure that may be a bug, where no smaller size has confirmed it as out of memory."""
    return NotMeasuredError(
        f"micro-batch {trial.micro_batch} failed with a message that may mean out of memory or a bug, and no "
        f"smaller size ran in a fresh process: {trial.message or 'no message'}"
    )


def tight_warning(largest_fit: int, *, predicted: bool) -> str:
    """Return the warning about a largest size that runs only with the allocator's retries."""
    how = "fits only if" if predicted else "ran only because"
    return f"micro-batch {largest_fit} {how} the allocator released its cache and tried again, which is slow"


def stop_warning(limit: str, largest_fit: int, first_fail: int | None) -> str:
    """Return the warning about a search that `limit` ended early."""
    fails = "" if first_fail in (None, largest_fit + 1) else f" and below {first_fail}"
    return f"{limit} ended the search: no size above {largest_fit}{fails} was tried to its end, larger ones may fit"


def peak_bytes(trial: Trial) -> int | None:
    """Return the peak that counts against a limit: reserved where it is known, else allocated; None: not measured."""
    return trial.peak_allocated_bytes if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes


def all_warnings(
    inspection: Inspection, schedule: Schedule, of_sizes: Iterable[str], prediction: Prediction | None
) -> tuple[str, ...]:
    """Return every warning of a plan once, the most severe first, since only the first are shown.

    The order: what makes the gradient differ from the full batch's (`warnings` of the inspection and the prediction),
    what may keep the plan from running (`of_sizes` that did not run as expected), and what makes the measurement less
    reliable (`cautions` of the inspection).
    """
    of_parts = inspection.accumulation_warnings if schedule.iter_size > 1 else ()
    of_prediction = () if prediction is None else prediction.warnings
    return tuple(dict.fromkeys((*inspection.warnings, *of_parts, *of_prediction, *of_sizes, *inspection.cautions)))


def ranks_notes(device: Device, *, holds_own: bool) -> list[str]:
    """Return what several ranks take and trials did not.

    With `holds_own`, trials held the outputs of one rank, where each will hold those of all for a coupled loss.
    """
    notes = []
    if device.describe()["kind"] == "cuda":
        notes.append(
            "what NCCL holds on each card, some hundred MiB beside PyTorch's allocator, is not part of the trials"
        )
    if holds_own:
        notes.append(
            "each rank computes the coupled loss of all ranks' outputs, and trials in lock step held those of one"
        )
    return [f"{note}: leave room for it (--reserve)" for note in notes]


def all_notes(
    inspection: Inspection,
    schedule: Schedule,
    request: PlanRequest,
    ceiling: int,
    prediction: Prediction | None,
    more: Iterable[str],
) -> tuple[str, ...]:
    """Return every note of a plan, the most important first, since only the first are shown."""
    notes, facts = list[str](), inspection.workload
    of_prediction = () if prediction is None else prediction.notes
    if schedule.iter_size > 1 and inspection.coupling is None:
        notes.append("gradient equivalence was not checked: run `autoaccum verify`")
    if facts.assumes_weight and inspection.coupling is None:
        notes.append(
            f"the divisor of the loss, {facts.weight}, was taken from the model's class, since nothing was"
            " computed: `autoaccum verify` checks it"
        )
    notes += of_prediction[:1]
    notes += inspection.notes
    idle = sum(1 for parts in schedule.ranks if not sum(parts))
    if idle:
        notes.append(
            f"{idle} of {schedule.world_size} ranks have no samples of their own: the target is smaller than the world"
        )
    if request.options.equal and (cost := equal_parts_cost(schedule, ceiling, request.multiple_of)):
        notes.append(cost)
    if inspection.found_multiple is not None:
        notes.append(inspection.found_multiple)
    if facts.modules:
        sizes = ", ".join(f"{name} ({format_bytes(size)})" for name, size in facts.modules.items())
        notes.append(f"modules outside the model that are on its device too: {sizes}")
    return (*notes, learning_rate_note(schedule, facts.reduction), *of_prediction[1:], *more)


def learning_rate_note(schedule: Schedule, reduction: str) -> str:
    """Return the note on the learning rate: it stays the same, since the gradient is the full batch's."""
    rate = f"keep the learning rate of a batch of {schedule.target_batch}"
    if schedule.iter_size == 1:
        return f"{rate}: one micro-batch is the whole update"
    if reduction == "sum":
        return f"{rate}: the loss is a sum, and the parts' losses are added up"
    return f"{rate}: each part counts by its share of that"
