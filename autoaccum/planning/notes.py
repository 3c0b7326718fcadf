"""What a plan records beside its numbers: the workload, and what is good to know of the schedule."""

from __future__ import annotations

from typing import Any

from autoaccum.accumulation.schedule import Schedule, equal_parts_cost
from autoaccum.devices.base import Inspection
from autoaccum.planning.request import Request


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
    }


def plan_notes(schedule: Schedule, request: Request, ceiling: int, inspection: Inspection) -> list[str]:
    """What is good to know of a schedule, as sentences."""
    notes = [learning_rate_note(schedule, inspection.reduction)]
    if request.equal and (cost := equal_parts_cost(schedule, ceiling, request.each)):
        notes.append(cost)
    if schedule.iter_size > 1 and inspection.coupling is None:
        notes.append(
            "whether samples are coupled was not looked at, since nothing was computed: `autoaccum verify` tells"
        )
    if inspection.found_multiple is not None:
        notes.append(inspection.found_multiple)
    if inspection.loss == "model" and inspection.coupling is None and inspection.weight.endswith(")"):
        notes.append(
            f"that the loss divides by {inspection.weight} follows from the model's class alone, since nothing was"
            " computed: `autoaccum verify` proves it"
        )
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
