"""What a study has to know of a workload: found out in the child, by building everything once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.planned import unwrapped
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import WorkloadError
from autoaccum.training.trainee import find_device
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.running.held_out import split_data
from autoaccum.tuning.settings import Budget
from autoaccum.workload.nests import type_name
from autoaccum.workload.optimizers import own_rate, rate_is_followed
from autoaccum.workload.spec import Workload, no_batch


def find_facts(
    workload: Workload,
    device: str,
    target_batch: int,
    *,
    least_batch: int | None = None,
    budget: Budget | None = None,
) -> Facts:
    """Build model, optimizer and schedule; nothing is trained.

    Args:
        workload: With what the study asks of it in place of its own.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        target_batch: Samples of the largest update there will be.
        least_batch: Of the smallest; None: of all.
        budget: Of a trial; None: once over the data.

    Raises:
        WorkloadError: It cannot be tuned: no data, too little of it, no learning rate, or one that its schedule takes
            no notice of, or a schedule that is over before a trial is.
        UsageError: There is no such device.
    """
    place = find_device(device)
    split = split_data(workload)
    if split.training_samples is not None and split.training_samples < target_batch:
        raise WorkloadError(
            f"{split.training_samples:,} samples are trained on, fewer than the target batch of {target_batch:,}",
            hint="take a smaller --target-batch, or give more data",
        )
    seed_everything()
    model = workload.build_model().to(place)
    optimizer = workload.build_optimizer(model)
    rate = own_rate(optimizer)
    updates = _most_updates(budget, least_batch or target_batch, split.training_samples)
    return Facts(
        name=workload.name,
        digest=workload.digest,
        model=type_name(unwrapped(model)),
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        optimizer=type_name(optimizer),
        learning_rate=rate,
        schedule=_find_schedule(workload, lambda: workload.build_optimizer(model), updates),
        precision=workload.precision,
        batchnorm=workload.batchnorm,
        has_batch=workload.batch is not no_batch,
        training_samples=split.training_samples,
        held_out=split.words,
        device=str(place),
        card=torch.cuda.get_device_name(place) if place.type == "cuda" else None,
        batchnorms=tuple(batchnorm_names(model, workload.objective.criterion_module)),
    )


def _most_updates(budget: Budget | None, least_batch: int, training_samples: int | None) -> int | None:
    """Of a trial; None where nobody can tell. The last update of an epoch may be a small one."""
    if training_samples is None or (budget is not None and budget.unit == "seconds"):
        return None
    samples = training_samples if budget is None else int(budget.amount)
    epochs, rest = divmod(samples, training_samples)
    return epochs * math.ceil(training_samples / least_batch) + math.ceil(rest / least_batch)


def _find_schedule(workload: Workload, make_optimizer: Callable[[], Optimizer], updates: int | None) -> str | None:
    """The class of the schedule.

    Raises:
        WorkloadError: It has learning rates of its own, or none for so many updates.
    """
    schedule = workload.build_scheduler(make_optimizer())
    if schedule is None:
        return None
    name = type_name(schedule)
    if isinstance(schedule, OneCycleLR) and updates is not None and updates > schedule.total_steps:
        raise WorkloadError(
            f"{name} is made for {schedule.total_steps:,} updates, and a trial makes {updates:,}",
            hint=f"give it total_steps={updates}, or the trials fewer samples: --budget-samples",
        )
    if not rate_is_followed(make_optimizer, workload.build_scheduler):
        raise WorkloadError(
            f"{name} sets learning rates of its own, whatever the optimizer has: there is nothing to tune",
            hint='have it begin with the optimizer\'s: max_lr=optimizer.param_groups[0]["lr"]',
        )
    return name
