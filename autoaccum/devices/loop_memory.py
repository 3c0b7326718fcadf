"""What a training loop holds beside its step: outputs it still names, averages of the weights, an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from autoaccum.accumulation.backpropagation import autocast, model_device
from autoaccum.accumulation.plan_check import unwrap_model
from autoaccum.accumulation.recovery import find_out_of_memory
from autoaccum.checks import type_name
from autoaccum.errors import WorkloadError
from autoaccum.workload import pytree
from autoaccum.workload.batches import move_batch
from autoaccum.workload.objective import Objective
from autoaccum.workload.spec import Workload
from autoaccum.workload.tracebacks import user_code

EMA_DECAY = 0.999
"""As torch has it by itself."""

_average: Any = swa_utils.get_ema_multi_avg_fn
_PASSES = 2
"""What the first one leaves is still named while the second runs."""


class HeldOutputs:
    """What a loop still names of its last micro-batch: each is let go of when the next one has taken its name.

    Attributes:
        calls: What the model returned, by the order of its calls for one micro-batch.
        terms: The loss.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.terms: dict[str, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are named, as far as containers show them."""
        return list(pytree.tensors([self.calls, self.terms]))

    @contextmanager
    def naming(self, model: nn.Module) -> Iterator[None]:
        """Within, what `model` returns is named, as that of one micro-batch."""
        number = 0

        def name(module: nn.Module, inputs: Any, outputs: Any) -> None:
            nonlocal number
            self.calls[number : number + 1] = [outputs]
            number += 1

        with model.register_forward_hook(name):
            yield
        del self.calls[number:]


@dataclass(frozen=True)
class HoldingObjective(Objective):
    """An objective that names what the model returns, and the loss.

    Attributes:
        kept: Where.
    """

    kept: HeldOutputs = dataclasses.field(default_factory=HeldOutputs)

    def terms(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """As `Objective` has it."""
        with self.kept.naming(model):
            terms = super().terms(model, batch)
        self.kept.terms = terms
        return terms


def naming(objective: Objective, kept: HeldOutputs) -> HoldingObjective:
    """`objective`, whose outputs and losses `kept` names."""
    fields = {field.name: getattr(objective, field.name) for field in dataclasses.fields(objective)}
    return HoldingObjective(**fields, kept=kept)


class EmaModel:
    """An exponential moving average of a model's weights beside them, and a copy of its buffers.

    Args:
        model: The model, on its device.
        decay: What is left of the average at each update.

    Raises:
        WorkloadError: It cannot be copied.
    """

    def __init__(self, model: nn.Module, decay: float = EMA_DECAY) -> None:
        self.decay = decay
        self._model = unwrap_model(model)
        try:
            self._averaged = swa_utils.AveragedModel(self._model, multi_avg_fn=_average(decay))
        except (TypeError, RuntimeError, AttributeError) as error:
            if find_out_of_memory(error) is not None:
                raise
            raise WorkloadError(
                f"the model, a {type_name(self._model)}, cannot be copied for its average ({error})",
                hint='an average by torch.optim.swa_utils is a deep copy: leave "ema" out of keeps (--keeps)',
            ) from error

    @property
    def model(self) -> nn.Module:
        """The copy, whose weights are the averages."""
        return self._averaged.module

    @property
    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [*self.model.parameters(), *self.model.buffers()]

    @property
    def updates(self) -> int:
        """How many were taken in; the first one is copied."""
        return int(self._averaged.n_averaged)

    @updates.setter
    def updates(self, value: int) -> None:
        self._averaged.n_averaged.fill_(value)

    def update(self) -> None:
        """Take the weights in, as they are after an update.

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
                hint='register no parameters or buffers in forward, or leave "ema" out of keeps (--keeps)',
            ) from error


def evaluate(workload: Workload, model: nn.Module) -> None:
    """Two passes of an evaluation, as between updates; the modes of `model` are put back.

    What the user's code raises comes through as it is, except that of a loss that was not written for evaluation.

    Raises:
        WorkloadError: The batch has another number of samples, or the loss cannot be taken in eval mode.
    """
    assert workload.evaluation_batch is not None
    held = workload.build_batch(workload.evaluation_batch)
    device = model_device(model)
    objective = naming(workload.objective, HeldOutputs())  # With what the model returns named for a metric.
    outputs: Any = None
    with _resting(model), torch.no_grad():
        for _ in range(_PASSES):
            batch = move_batch(held, device)
            with autocast(workload.precision, device):
                if workload.evaluate is not None:
                    outputs = workload.evaluate(model, pytree.unwrap_batch(batch))
                    continue
                with user_code("the loss in eval mode (there is no def evaluate(model, batch))"):
                    outputs = objective.terms(model, batch)
    del outputs


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """Within, `model` is in eval mode; afterwards every module is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
