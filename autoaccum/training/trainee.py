"""What is trained, in place: model, loss, optimizer, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm_modes import checked_batchnorm
from autoaccum.accumulation.gradients import choose_scaler
from autoaccum.accumulation.planned import unwrapped
from autoaccum.accumulation.reach import find_named
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.accumulation.validation import check_precision, check_scheduler
from autoaccum.devices.companions import EMA_DECAY, Averages
from autoaccum.errors import UsageError
from autoaccum.options import AccumulateIn, BatchNormMode, read_accumulate_in
from autoaccum.planning.device_choice import card_index, check_device
from autoaccum.training.request import FitRequest
from autoaccum.workload.weights import Objective


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """What is trained, in place on its device.

    Attributes:
        model: The model.
        objective: The loss.
        optimizer: Its optimizer.
        scheduler: The schedule of its learning rate; None when there is none.
        scaler: The loss scaler of fp16; None otherwise.
        precision: `fp32`, `bf16` or `fp16`.
        batchnorm: `micro`, `running` or `frozen`.
        accumulate_in: `fp32` or `parameters`.
        evaluate: The workload's own `evaluate(model, batch)`; None: the loss is evaluated.
        averages: The average of its weights; None: none is kept.
    """

    model: nn.Module
    objective: Objective
    optimizer: Optimizer
    scheduler: Any
    scaler: GradScaler | None
    precision: str
    batchnorm: BatchNormMode
    accumulate_in: AccumulateIn
    evaluate: Callable[..., Any] | None
    averages: Averages | None = None

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return model_device(self.model)

    @property
    def devices(self) -> list[torch.device]:
        """Every device that parameters or buffers are on: a model may be on two cards."""
        return list(dict.fromkeys(tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())))

    @property
    def beside(self) -> list[nn.Module]:
        """The criterion, where it is a module, and other modules that the loss names."""
        named = find_named(self.objective, unwrapped(self.model)).values()
        criterion = self.objective.criterion_module
        return [*named] if criterion is None else [criterion, *named]


def make_trainee(
    request: FitRequest,
    model: nn.Module,
    objective: Objective,
    optimizer: Optimizer,
    *,
    scheduler: Any,
    precision: str,
    batchnorm: str,
    accumulate_in: str,
    evaluate: Callable[..., Any] | None,
    keeps: Sequence[str],
) -> Trainee:
    """What is trained, of a model that is in place; a criterion's buffers are moved to it. The rest as in `Trainee`.

    Raises:
        UsageError: The scheduler, the precision or the mode of BatchNorm cannot be used.
        WorkloadError: The model cannot be copied for an average.
    """
    check_precision(precision)
    check_scheduler(scheduler, optimizer)
    device = model_device(model)
    objective.move_criterion(device)
    _check_criterion(objective, optimizer)
    ema_decay = _choose_ema_decay(request.ema_decay, keeps)
    if not model.training:  # As `from_pretrained` leaves it; single modules that are at rest stay so otherwise.
        model.train()
    return Trainee(
        model=model,
        objective=objective,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=choose_scaler(precision, None, device, optimizer_parameters(optimizer)),
        precision=precision,
        batchnorm=checked_batchnorm(batchnorm, model),
        accumulate_in=read_accumulate_in(accumulate_in),
        evaluate=evaluate,
        averages=None if ema_decay is None else Averages(model, ema_decay),
    )


def _choose_ema_decay(decay: float | None, keeps: Sequence[str]) -> float | None:
    """The decay of the average of the weights that is asked for; None: none is kept."""
    if "ema" in keeps:
        return EMA_DECAY if decay is None else decay
    if decay is not None:
        raise UsageError(
            f"ema_decay is {decay:g}, and no average of the weights is kept",
            hint='ask for one: keeps="ema" (--keeps ema)',
        )
    return None


def _check_criterion(objective: Objective, optimizer: Optimizer) -> None:
    function = None if objective.criterion is None else objective.criterion.function
    updated = {id(parameter) for parameter in optimizer_parameters(optimizer)}
    trainable = function.parameters() if isinstance(function, nn.Module) else ()
    if any(parameter.requires_grad and id(parameter) not in updated for parameter in trainable):
        raise UsageError(
            f"{type(function).__name__} has trainable parameters that the optimizer does not hold",
            hint="give an optimizer of both, make it a part of the model, or set requires_grad to False",
        )


def find_device(asked: str) -> torch.device:
    """The device called `auto` (the first card, where there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError: There is none of that name here.
    """
    check_device(asked)
    index = card_index(asked)
    return torch.device("cpu") if index is None else torch.device("cuda", index)
