"""Split a loss of a model and a batch into the model's outputs and a loss of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autoaccum.errors import WorkloadError
from autoaccum.workload.objective import CoupledLoss


def take_apart(loss: Callable[[nn.Module, Any], Any]) -> CoupledLoss:
    """Return `loss` as a coupled loss: the outputs are what the model returns where the loss calls it, once."""
    models: list[nn.Module] = []

    def outputs(model: nn.Module, batch: Any) -> Any:
        models[:] = [model]
        called = _Called(model)
        loss(called, batch)  # type: ignore[arg-type]
        if len(called.outputs) != 1:
            raise WorkloadError(f"the loss calls the model {len(called.outputs)} times for a batch, not once")
        return called.outputs[0]

    return CoupledLoss(outputs, lambda found, batch: loss(_Called(models[0], found), batch))  # type: ignore[arg-type]


class _Called:
    """Stands for a model and keeps what its calls return; with `recalled`, a call returns that and runs nothing."""

    def __init__(self, model: nn.Module, *recalled: Any) -> None:
        self._model, self._recalled = model, recalled
        self.outputs: list[Any] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.outputs.append(self._recalled[0] if self._recalled else self._model(*inputs, **named))
        return self.outputs[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
