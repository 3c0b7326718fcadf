"""What is known of a workload before any prediction: from one rehearsal on the simulated card."""

from __future__ import annotations

from autoaccum.devices.base import Inspection
from autoaccum.devices.environment import describe_environment
from autoaccum.devices.inspection import (
    FORM_SAMPLES,
    SAMPLES,
    collected_warnings,
    describe_subject,
    few_samples,
    find_advice,
    find_least_size,
    with_multiple,
)
from autoaccum.devices.simulated.card_mode import CardMode
from autoaccum.devices.simulated.impersonation import DEVICE
from autoaccum.devices.simulated.trace import Trace
from autoaccum.devices.simulated.tracing import trace_rehearsal
from autoaccum.workload.spec import Workload


def inspect_simulated(
    workload: Workload, share: int, optimizer: str | None, mode: CardMode
) -> tuple[Inspection, Trace]:
    """Rehearse two micro-batches of two samples, or what there is.

    Nothing is computed, so that neither the loss nor the weighting of its parts can be checked.

    Args:
        workload: With the precision the plan asks for.
        share: Samples per update on this rank.
        optimizer: Overrides the workload's by a name of `torch.optim`.
        mode: The simulation, entered.

    Returns:
        The inspection, and the rehearsal's trace.

    Raises:
        WorkloadError: It cannot be trained, as far as that shows without values.
    """
    size = few_samples(workload, SAMPLES, share)
    with collected_warnings() as said:
        trace, made = trace_rehearsal(workload, (size,) if size == share else (size, size), optimizer, mode)
    workload, found_multiple = with_multiple(workload, made.model, share)
    samples = few_samples(workload, FORM_SAMPLES, share)
    fields = describe_subject(workload, made.model, made.optimizer, samples, made.terms)
    fields["recipe"]["misweighted"] = find_advice(said)
    inspection = Inspection(
        **fields,
        environment=describe_environment(DEVICE),
        least_size=find_least_size(workload, made.model),
        found_multiple=found_multiple,
        accumulation_warnings=tuple(said),
        cautions=tuple(mode.notices),
        notes=tuple(mode.checks),
    )
    return inspection, trace
