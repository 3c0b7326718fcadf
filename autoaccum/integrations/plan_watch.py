"""Compare a plan with the training that a framework is about to run, and with the memory that it then takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.argument_checks import differences, model_facts, plan_facts
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.checks import counted
from autoaccum.planning.plan_record import Plan
from autoaccum.spec import RECOMPUTE
from autoaccum.units import format_bytes


class PlanWarning(UserWarning):
    """A warning that a training differs from its plan."""


def read_plan(plan: Plan | str | Path) -> Plan:
    """Return the plan, or read it from its file; raise PlanFileError if that has none."""
    return plan if isinstance(plan, Plan) else Plan.load(plan)


@dataclass(frozen=True, kw_only=True)
class Running:
    """What a framework is about to run.

    Attributes:
        model: The model, on its device.
        optimizer: Its optimizer, which may be wrapped by the framework; None where there is none yet.
        precision: `fp32`, `bf16` or `fp16`; None where it is not known.
        micro_batch: Samples that run at once on a rank; None where the plan's own parts and savers run.
        batch: Samples per update, over all ranks; None where that is not known.
        world_size: Number of ranks.
        checkpointing: Whether the framework turns the model's gradient checkpointing on; None where that is not known.
        names: The framework's names of the micro-batch, and of what makes up the batch.
    """

    model: nn.Module
    optimizer: Optimizer | None
    precision: str | None
    micro_batch: int | None
    batch: int | None
    world_size: int
    checkpointing: bool | None
    names: tuple[str, str]


def find_differences(plan: Plan, running: Running) -> list[str]:
    """Return a sentence for each way in which the training is not the one that was planned."""
    here = model_facts(running.model, running.optimizer, running.precision)
    found = [
        f"here is {ours}, the plan is for {theirs}: plan again for what is here"
        for theirs, ours in differences(plan_facts(plan), here)
    ]
    micro, (name, batch_names) = running.micro_batch, running.names
    if micro is not None and micro != plan.micro_batch:
        outcome = "may not fit" if micro > plan.micro_batch else "takes more micro-batches than needed"
        found.append(
            f"{name} is {micro}, the plan's micro-batch {plan.micro_batch}: {micro} {outcome}, take {plan.micro_batch}"
        )
    if running.batch is not None and running.batch != plan.target_batch:
        found.append(
            f"an update has {counted(running.batch, 'sample')} ({batch_names}), the plan's has"
            f" {plan.target_batch}: change one of these, or plan for --target-batch {running.batch}"
        )
    if running.world_size != plan.world_size:
        found.append(
            f"{counted(running.world_size, 'rank')} train, the plan is for {plan.world_size}: plan with"
            f" --world-size {running.world_size}"
        )
    savers = () if micro is None else tuple(plan.spec.savers)
    recomputes = [word for word in savers if word.startswith(RECOMPUTE) and running.checkpointing is not None]
    if others := [word for word in savers if word not in recomputes]:
        found.append(
            f"the plan needs {' and '.join(others)} (--savers), which only the Accumulator does: train by it, or"
            " plan without"
        )
    planned = bool(recomputes or plan.workload.recipe.checkpointing)
    if running.checkpointing not in (None, planned):
        on, off = ("in the plan", "here") if planned else ("here", "in the plan")
        found.append(f"gradient checkpointing is on {on} and off {off}: set it alike, or plan again")
    return found


def read_peak(device: torch.device) -> int | None:
    """Return the most memory that PyTorch's allocator has held on a card; None on the CPU, where nobody counts it."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


class PlanWatch:
    """Watches a training by its plan: warns of differences at the start and of a higher peak in the run.

    Args:
        plan: The plan, or its file, which is read when the training begins: what it trains may be planned first.
        read_peak: Returns the peak in bytes on a device since the process began; None where it cannot be told.
    """

    def __init__(self, plan: Plan | str | Path, read_peak: Callable[[torch.device], int | None] = read_peak) -> None:
        self._given, self._read_peak = plan, read_peak
        self._device = torch.device("cpu")
        self._updates, self._exceeded = 0, False

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return read_plan(self._given)

    def begin(self, running: Running, *cautions: str) -> None:
        """Warn of each difference and of `cautions` (`PlanWarning`); count updates from here."""
        self._device, self._updates, self._exceeded = model_device(running.model), 0, False
        for sentence in (*find_differences(self.plan, running), *cautions):
            warnings.warn(sentence, PlanWarning, stacklevel=3)

    def update(self) -> None:
        """Count an update; warn once if the peak has passed the plan's."""
        self._updates += 1
        peak, planned = self._read_peak(self._device), self.plan.peak_bytes
        if self._exceeded or peak is None or planned is None or peak <= planned + (self.plan.band_bytes or 0):
            return
        self._exceeded = True
        warnings.warn(
            f"the peak is {format_bytes(peak)} after {counted(self._updates, 'update')}, the plan's"
            f" {format_bytes(planned)} of {format_bytes(self.plan.limit_bytes)}: plan with the longest samples that"
            " training sees (--worst-of), and with what else the loop holds (--keeps, --evaluation-batch)",
            PlanWarning,
            stacklevel=3,
        )

    def summary(self) -> str:
        """Return the line for the end: updates, and the peak beside the plan's."""
        plan, peak = self.plan, self._read_peak(self._device)
        seen = "not measured on this device" if peak is None else format_bytes(peak)
        planned = "not measured" if plan.peak_bytes is None else f"{format_bytes(plan.peak_bytes)} ({plan.kind})"
        return (
            f"autoaccum: {counted(self._updates, 'update')} of {plan.target_batch} samples planned; peak {seen},"
            f" the plan's {planned} of {format_bytes(plan.limit_bytes)}"
        )
