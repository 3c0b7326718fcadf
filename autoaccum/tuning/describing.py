"""What a study has to know of a workload, found in the child; and the data of its trials."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset

from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.planned import unwrapped
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import WorkloadError, first_line
from autoaccum.training.data.source import is_map_style
from autoaccum.training.trainee import find_device
from autoaccum.tuning.records import Facts
from autoaccum.workload.nests import kind, type_name
from autoaccum.workload.optimizers import own_rate, rate_is_followed
from autoaccum.workload.spec import Workload, no_batch

_HELD_OUT_SHARE = 10
"""One of so many samples is held out, where the workload has no evaluation_dataset."""
_SEED = 0


def find_facts(workload: Workload, device: str, target_batch: int) -> Facts:
    """Build model, optimizer and schedule; nothing is trained.

    Args:
        workload: With what the study asks of it in place of its own.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        target_batch: Samples of the largest update there will be.

    Raises:
        WorkloadError: It cannot be tuned: no data, too little of it, no learning rate, or one that its schedule takes
            no notice of.
        UsageError: There is no such device.
    """
    place = find_device(device)
    _, _, samples, held_out = split_data(workload)
    if samples is not None and samples < target_batch:
        raise WorkloadError(
            f"{samples:,} samples are trained on, fewer than the target batch of {target_batch:,}",
            hint="take a smaller --target-batch, or give more data",
        )
    seed_everything()
    model = workload.build_model().to(place)
    optimizer = workload.build_optimizer(model)
    schedule = workload.build_scheduler(workload.build_optimizer(model))
    if schedule is not None and not rate_is_followed(lambda: workload.build_optimizer(model), workload.build_scheduler):
        raise WorkloadError(
            f"{type_name(schedule)} sets learning rates of its own: there is nothing to tune",
            hint='have it begin with the optimizer\'s: max_lr=optimizer.param_groups[0]["lr"]',
        )
    return Facts(
        name=workload.name,
        digest=workload.digest,
        model=type_name(unwrapped(model)),
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        optimizer=type_name(optimizer),
        learning_rate=own_rate(optimizer),
        schedule=None if schedule is None else type_name(schedule),
        precision=workload.precision,
        batchnorm=workload.batchnorm,
        has_batch=workload.batch is not no_batch,
        training_samples=samples,
        held_out=held_out,
        device=str(place),
        card=torch.cuda.get_device_name(place) if place.type == "cuda" else None,
        batchnorms=tuple(batchnorm_names(model, workload.objective.criterion_module)),
    )


def split_data(workload: Workload) -> tuple[Any, Any, int | None, str]:
    """Take the workload's own `evaluation_dataset`, or hold out a tenth of its dataset, the same each time.

    Returns:
        What is trained on, what is held out, how many samples are trained on (None where the data does not tell), and
        what is held out as a phrase.

    Raises:
        WorkloadError: There is no dataset, or none that a tenth can be taken of, or it is too small.
    """
    data, given = workload.dataset, workload.evaluation_dataset
    if data is None:
        raise WorkloadError(
            f"{workload.name} has no dataset to train on", hint="define dataset = ... in it: samples, by index"
        )
    total = _count(data)
    if given is not None:
        held = _count(given)
        if held == 0:
            raise WorkloadError("evaluation_dataset has no samples", hint="give some, or leave it away")
        return data, given, total, "evaluation_dataset" + ("" if held is None else f" ({held:,} samples)")
    if total is None or total < 2:
        seen = f"{total} samples" if total is not None else f"a {type(data).__name__}, which gives none by index"
        raise WorkloadError(f"no samples can be held out of {seen}", hint="define evaluation_dataset in the workload")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(_SEED)).tolist()
    held = max(1, round(total / _HELD_OUT_SHARE))
    words = f"{held:,} of {total:,} samples of dataset, drawn by seed {_SEED}"
    return Subset(data, sorted(order[held:])), Subset(data, sorted(order[:held])), total - held, words


def _count(data: Any) -> int | None:
    """Count samples; None where there are only batches, or samples that come one after the other."""
    if not (isinstance(data, (list, tuple)) or is_map_style(data)):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError) as error:
        raise WorkloadError(
            f"{kind(data)} has no length ({first_line(error)})", hint="define __len__ in the dataset"
        ) from error
