"""What trials and plans mean, in sentences: the clear no, whose fault, and what is good to know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoaccum.accumulation.schedule import Schedule, equal_parts_cost
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.explanation import Prediction
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, WorkloadError
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.serialization import to_plain
from autoaccum.units import format_bytes

_SMALLER_EVALUATION = "a smaller evaluation_batch (--evaluation-batch), or more memory"
_RECORDED = (
    *("name", "digest", "model", "parameters", "parameter_bytes", "precision", "optimizer", "loss", "reduction"),
    *("weight", "recipe", "keeps", "evaluation_batch", "worst_of", "batchnorm", "accumulate_in", "modules"),
)
_LESS_MEMORY = "a smaller model, --precision bf16, activation checkpointing, or more memory"


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is known of a workload's memory before any trial.

    Attributes:
        least_bytes: What any size holds: the parameters.
        update_bytes: The peak of one update of `update_samples` samples that nothing limited; None: not measured.
        sample_bytes: What the activations of one sample take; None: not measured.
        predicted: Whether trials are predicted: then nothing ran, and one that failed has a peak all the same.
    """

    least_bytes: int = 0
    update_bytes: int | None = None
    update_samples: int = 0
    sample_bytes: int | None = None
    predicted: bool = False


def trial_error(trial: Trial) -> AutoaccumError:
    """The error to raise for a trial whose outcome is `error`: the workload's fault, or the measurement's."""
    where = f" in {trial.phase}" if trial.phase else ""
    message = trial.message or "no message"
    if not re.match(rf"micro-batch {trial.micro_batch}\b", message):
        message = f"micro-batch {trial.micro_batch} failed{where}: {message}"
    if trial.blames == "user":
        return WorkloadError(message, user_traceback=trial.traceback)
    return NotMeasuredError(message)


def does_not_fit(trial: Trial, limit_bytes: int, need: Need | None = None) -> DoesNotFitError:
    """The clear no for the smallest trial that ran out of memory: bytes needed, bytes there, what to do.

    A trial that really failed has no peak of its own: what an unlimited update took says what is needed, else what it
    held when it failed and the parameters are lower bounds.
    """
    need = need or Need()
    held, there = peak_bytes(trial), f"{format_bytes(limit_bytes)} are there"
    known = max(held or 0, need.least_bytes)
    where = f" in {trial.phase}" if trial.phase else ""
    hint = f"take {_LESS_MEMORY}"
    if trial.phase == "batch":
        hint = "a trial holds the effective batch: take a smaller --target-batch, smaller samples, or more memory"
    if trial.phase == "evaluation":
        hint = f"take {_SMALLER_EVALUATION}"
        taken = f"; it would take {format_bytes(held)} where nothing limits it" if need.predicted and held else ""
        message = (
            f"the evaluation does not fit: after an update of micro-batch {trial.micro_batch} it ran out of memory, "
            f"{there}{taken}"
        )
    elif need.predicted and held:
        message = (
            f"micro-batch {trial.micro_batch} does not fit: it would take {format_bytes(held)} where nothing limits "
            f"it, {there}"
        )
    elif need.update_bytes is not None and need.update_bytes > limit_bytes and trial.phase != "batch":
        samples = "1 sample" if need.update_samples == 1 else f"{need.update_samples} samples"
        message = (
            f"micro-batch {trial.micro_batch} ran out of memory{where}: one update of {samples} takes "
            f"{format_bytes(need.update_bytes)} where nothing limits it, {there}"
        )
    elif known > limit_bytes:
        message = f"micro-batch {trial.micro_batch} needs at least {format_bytes(known)}, {there}"
    else:
        so_far = f" with {format_bytes(held)} taken" if held else ""
        message = f"micro-batch {trial.micro_batch} needs more memory than there is, {there}: it ran out{where}{so_far}"
    return DoesNotFitError(message, hint=hint)


def doubtful(trial: Trial) -> NotMeasuredError:
    """The error to raise for a failure that may be a bug, and that no smaller size has settled."""
    return NotMeasuredError(
        f"micro-batch {trial.micro_batch} failed with a message that may mean a lack of memory or a bug, and no "
        f"smaller size ran in a fresh process: {trial.message or 'no message'}"
    )


def monotony_warnings(trials: Sequence[Trial]) -> list[str]:
    """Sentences on memory that does not grow with the size; none where it does."""
    ran = {t.micro_batch for t in trials if t.ran}
    failed = {t.micro_batch for t in trials if t.outcome == "oom"} - ran
    above = [size for size in sorted(ran) if failed and size > min(failed)]
    if not above:
        return []
    return [
        f"memory is not monotone here: size {above[0]} ran although size {min(failed)} did not, so that other sizes "
        "may not do what their neighbours did"
    ]


def tight_warning(largest_fit: int, *, predicted: bool) -> str:
    """The sentence on a largest size that runs only by the allocator's retries."""
    how = "fits only if" if predicted else "ran only because"
    return f"micro-batch {largest_fit} {how} the allocator released its cache and tried again, which is slow"


def stop_warning(limit: str, largest_fit: int, first_fail: int | None) -> str:
    """The sentence on a search that `limit` ended early."""
    fails = "" if first_fail in (None, largest_fit + 1) else f" and below {first_fail}"
    return f"{limit} ended the search: no size above {largest_fit}{fails} was tried to its end, larger ones may fit"


def peak_bytes(trial: Trial) -> int | None:
    """The peak a limit is compared with: reserved where it is known, else allocated; None when not measured."""
    return trial.peak_allocated_bytes if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes


def describe_workload(inspection: Inspection, reference: str) -> dict[str, Any]:
    """What the plan records of the workload."""
    return {"reference": reference, **{name: to_plain(getattr(inspection, name)) for name in _RECORDED}}


def all_warnings(
    inspection: Inspection, schedule: Schedule, of_sizes: Iterable[str], prediction: Prediction | None
) -> tuple[str, ...]:
    """Every warning of a plan once, the most severe first, since only the first are shown.

    First what makes the gradient another than the full batch's (`warnings` of the inspection and the prediction), then
    what may keep the plan from running (`of_sizes` that did not run as others let expect), and last what is weak about
    the way it was found (`cautions` of the inspection).
    """
    of_parts = inspection.accumulation_warnings if schedule.iter_size > 1 else ()
    of_prediction = () if prediction is None else prediction.warnings
    return tuple(dict.fromkeys((*inspection.warnings, *of_parts, *of_prediction, *of_sizes, *inspection.cautions)))


def all_notes(
    inspection: Inspection,
    schedule: Schedule,
    request: PlanRequest,
    ceiling: int,
    prediction: Prediction | None,
    further: Iterable[str],
) -> tuple[str, ...]:
    """Every note of a plan, what limits it first, since only the first are shown: not checked, not run, not even."""
    notes = []
    of_prediction = () if prediction is None else prediction.notes
    if schedule.iter_size > 1 and inspection.coupling is None:
        notes.append(
            "no values were computed, and whether the gradient is the full batch's is not known: `autoaccum verify`"
            " tells"
        )
    if inspection.loss == "model" and inspection.coupling is None and inspection.weight.endswith(")"):
        notes.append(
            f"that the loss divides by {inspection.weight} follows from the model's class alone, since nothing was"
            " computed: `autoaccum verify` proves it"
        )
    notes += of_prediction[:1]
    notes += inspection.notes
    idle = sum(1 for parts in schedule.ranks if not sum(parts))
    if idle:
        notes.append(
            f"{idle} of {schedule.world_size} ranks have no samples of their own: the target is smaller than the world"
        )
    if request.options.equal and (cost := equal_parts_cost(schedule, ceiling, request.each)):
        notes.append(cost)
    if inspection.found_multiple is not None:
        notes.append(inspection.found_multiple)
    if inspection.modules:
        listed = ", ".join(f"{name} ({format_bytes(size)})" for name, size in inspection.modules.items())
        notes.append(f"beside the model, and on its device as well: {listed}")
    return (*notes, learning_rate_note(schedule, inspection.reduction), *of_prediction[1:], *further)


def learning_rate_note(schedule: Schedule, reduction: str) -> str:
    """What happens to the learning rate, in one sentence: nothing, since the gradient is the full batch's."""
    rate = f"keep the learning rate of a batch of {schedule.target_batch}"
    if schedule.iter_size == 1:
        return f"{rate}: one micro-batch is the whole update"
    if reduction == "sum":
        return f"{rate}: the loss is a sum, and the parts' losses are added up"
    return f"{rate}: each part counts by its share of that"
