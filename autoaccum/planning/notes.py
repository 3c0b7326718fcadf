"""What a plan records beside its numbers: the workload, and what is good to know of the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autoaccum.accumulation.schedule import Schedule, equal_parts_cost
from autoaccum.devices.base import Inspection
from autoaccum.devices.prediction import Prediction
from autoaccum.planning.request import Request
from autoaccum.units import format_bytes


def describe_workload(inspection: Inspection, reference: str) -> dict[str, Any]:
    """What the plan records of the workload."""
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
        "recipe": dict(inspection.recipe),
        "keeps": list(inspection.keeps),
        "evaluation_batch": inspection.evaluation_batch,
        "worst_of": inspection.worst_of,
        "batchnorm": inspection.batchnorm,
        "accumulate_in": inspection.accumulate_in,
        "modules": dict(inspection.modules),
    }


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
    request: Request,
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
