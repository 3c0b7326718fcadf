"""Memory that a training loop takes beside its step: held outputs, an EMA of the weights, an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from autoaccum.accumulation.argument_checks import unwrap_model
from autoaccum.accumulation.backpropagation import autocast, model_device
from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.checks import type_name
from autoaccum.errors import WorkloadError
from autoaccum.sharded_tensors import is_sharded_model
from autoaccum.sources import pytree
from autoaccum.sources.batches import move_batch
from autoaccum.sources.objective import Objective
from autoaccum.sources.workload import Workload
from autoaccum.tracebacks import user_code

EMA_DECAY = 0.999
"""The default of torch.optim.swa_utils.get_ema_multi_avg_fn."""

_average: Any = swa_utils.get_ema_multi_avg_fn
_PASSES = 2
"""The outputs of the first pass are still held while the second one runs."""


@dataclass(frozen=True)
class HoldingObjective(Objective):
    """An objective that holds the outputs and the loss of the last micro-batch, as a loop that still refers to them.

    Each is freed once its successor is there.

    Attributes:
        calls: The model's outputs, in the order of its calls for one micro-batch.
        losses: The terms of the loss, once there are any.
    """

    calls: list[Any] = field(default_factory=list)
    losses: list[dict[str, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, objective: Objective) -> HoldingObjective:
        """Return an objective like this one that holds its outputs."""
        return cls(**{field.name: getattr(objective, field.name) for field in dataclasses.fields(objective)})

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are held, as far as they are found in containers."""
        return list(pytree.tensors([self.calls, self.losses]))

    def terms(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """As `Objective.terms`."""
        number = 0

        def hold(module: nn.Module, inputs: Any, outputs: Any) -> None:
            nonlocal number
            self.calls[number : number + 1] = [outputs]
            number += 1

        with model.register_forward_hook(hold):
            terms = super().terms(model, batch)
        del self.calls[number:]
        self.losses[:] = [terms]
        return terms


class EmaModel:
    """An exponential moving average (EMA) of a model's weights, with a copy of its buffers.

    Args:
        model: The model, on its device.
        decay: The factor of the average at each update.

    Raises:
        WorkloadError: The model is sharded, or cannot be copied.
    """

    def __init__(self, model: nn.Module, decay: float = EMA_DECAY) -> None:
        self.decay = decay
        self._model = unwrap_model(model)
        if is_sharded_model(self._model):
            raise WorkloadError("a sharded model has no average of its weights", hint="train without ema (--no-ema)")
        try:
            self._averaged = swa_utils.AveragedModel(self._model, multi_avg_fn=_average(decay))
        except (TypeError, RuntimeError, AttributeError) as error:
            if find_out_of_memory(error) is not None:
                raise
            raise WorkloadError(
                f"the model, a {type_name(self._model)}, cannot be copied for its average ({error})",
                hint="an average by torch.optim.swa_utils is a deep copy: train without ema (--no-ema)",
            ) from error

    @property
    def model(self) -> nn.Module:
        """The copy of the model; its weights are the averages."""
        return self._averaged.module

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters and buffers of the copy."""
        return [*self.model.parameters(), *self.model.buffers()]

    @property
    def updates(self) -> int:
        """The number of updates so far; the first one copies the weights."""
        return int(self._averaged.n_averaged)

    @updates.setter
    def updates(self, value: int) -> None:
        self._averaged.n_averaged.fill_(value)

    def update(self) -> None:
        """Update the average with the weights, after an update of the model.

        Raises:
            WorkloadError: The model has other parameters or buffers than when it was copied.
        """
        try:
            self._averaged.update_parameters(self._model)
        except (ValueError, RuntimeError) as error:
            if find_out_of_memory(error) is not None:
                raise
            raise WorkloadError(
                f"torch.optim.swa_utils.AveragedModel cannot follow the model ({error})",
                hint="register no parameters or buffers in forward, or train without ema (--no-ema)",
            ) from error


def evaluate(workload: Workload, model: nn.Module) -> None:
    """Run two passes of an evaluation, as between updates, and restore the modes of `model`.

    Exceptions of the user's code pass through as they are, unless a loss that is not written for evaluation raises.

    Raises:
        WorkloadError: The batch has another number of samples, or the loss cannot be computed in eval mode.
    """
    assert workload.evaluation_batch is not None
    host_batch = workload.build_batch(workload.evaluation_batch)
    device = model_device(model)
    objective = HoldingObjective.of(workload.objective)  # A metric would hold the outputs.
    outputs: Any = None
    with _eval_mode(model), torch.no_grad():
        for _ in range(_PASSES):
            batch = move_batch(host_batch, device)
            with autocast(workload.precision, device):
                if workload.evaluate is not None:
                    outputs = workload.evaluate(model, pytree.unwrap_batch(batch))
                    continue
                with user_code("the loss in eval mode (there is no def evaluate(model, batch))"):
                    outputs = objective.terms(model, batch)
    del outputs


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into eval mode within; afterwards, restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
