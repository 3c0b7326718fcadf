"""What is trained, in place: model, loss, optimizer, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.planned import unwrapped
from autoaccum.accumulation.reach import find_named
from autoaccum.devices.companions import Averages
from autoaccum.options import AccumulateIn, BatchNormMode
from autoaccum.planning.device_choice import card_index, check_device
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


def find_device(asked: str) -> torch.device:
    """The device called `auto` (the first card, where there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError: There is none of that name here.
    """
    check_device(asked)
    index = card_index(asked)
    return torch.device("cpu") if index is None else torch.device("cuda", index)
