"""What is verified: copies of a workload's model, criterion and optimizer that all begin alike."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.planned import unwrapped
from autoaccum.errors import WorkloadError
from autoaccum.verification.doubles import in_double, widened
from autoaccum.workload.batches import move_batch
from autoaccum.workload.nests import type_name
from autoaccum.workload.spec import Workload
from autoaccum.workload.weights import Objective

Precision = Literal["fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Trained:
    """One copy, to be run once.

    Attributes:
        model: In training mode, on its device.
        objective: The loss, with a criterion of its own.
        optimizer: Of this model.
    """

    model: nn.Module
    objective: Objective
    optimizer: Optimizer

    @property
    def roots(self) -> dict[str, nn.Module]:
        """The model, and the criterion where it is a module."""
        criterion = self.objective.criterion
        function = None if criterion is None else criterion.function
        return {"": self.model, **({"criterion": function} if isinstance(function, nn.Module) else {})}


class Specimen:
    """A workload in one precision on one device; each run gets a copy of its own, so that nothing one changes lasts.

    What a compiled model was compiled from is taken: the arithmetic is the same, and copies compile nothing.

    Attributes:
        precision: `fp64` runs all in float64, whatever the workload trains in; the others as the Accumulator does.
        device: Where.
        workload: As it was given.

    Args:
        workload: What is verified.
        precision: See there.
        device: Where runs are made; the model is moved there.
        optimizer: A live optimizer of the workload's very model, which is copied with its state; None: one is made
            for each copy.

    Raises:
        WorkloadError: The model cannot be copied, or there is no optimizer to be made of it.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        precision: Precision = "fp64",
        device: torch.device | str = "cpu",
        optimizer: Optimizer | None = None,
    ) -> None:
        self.workload, self.precision = workload, precision
        self.device = torch.device(device)
        self._live = optimizer
        model = workload.build_model()
        memo: dict[int, Any] = {}
        self._model = self._placed(_copied(unwrapped(model), memo))
        self._optimizer = None if optimizer is None else _copied_optimizer(optimizer, memo)
        if self._optimizer is not None:
            self._cast_state(self._optimizer)
        self._objective = workload.objective

    def fresh(self) -> Trained:
        """A copy as training begins with it."""
        memo: dict[int, Any] = {}
        model = _copied(self._model, memo)
        objective = self._own_objective()
        if self._optimizer is not None:
            return Trained(model, objective, _copied_optimizer(self._optimizer, memo))
        return Trained(model, objective, self.workload.build_optimizer(model))

    def prepare_batch(self, batch: Any) -> Any:
        """A batch as runs are given it: on the device, in float64 where that is the precision."""
        return move_batch(widened(batch) if self.precision == "fp64" else batch, self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around every run: in its precision, without compiling."""
        with ExitStack() as stack:
            stack.enter_context(in_double() if self.precision == "fp64" else nullcontext())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _placed(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if self.precision != "fp64":
            return model
        model = model.double()
        for module in model.modules():  # What a model keeps beside its buffers: masks, tables.
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    setattr(module, name, widened(value).to(self.device))
        return model

    def _cast_state(self, optimizer: Optimizer) -> None:
        optimizer.load_state_dict(optimizer.state_dict())  # Casts to the parameters' dtype and device, but for `step`.

    def _own_objective(self) -> Objective:
        """The objective with a copy of its criterion, placed as the model is."""
        objective = self._objective
        criterion = objective.criterion
        if criterion is None:
            return objective
        function: Any = criterion.function
        if isinstance(function, nn.Module):
            function = self._placed(copy.deepcopy(function))
        elif isinstance(function, functools.partial):
            keywords = self.prepare_batch(dict(function.keywords))
            function = functools.partial(function.func, *function.args, **keywords)
        return dataclasses.replace(objective, criterion=dataclasses.replace(criterion, function=function))


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise WorkloadError(
            f"the model, a {type_name(model)}, cannot be copied ({str(error).partition(chr(10))[0]})",
            hint="verify compares runs of equal copies: keep locks, files and computed tensors out of the model",
        ) from error


def _copied_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy for the copied model; `deepcopy` leaves out what a class of the user's own keeps in further attributes."""
    made = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(made) and not callable(value):  # A patched `step` would be the original's.
            setattr(made, name, copy.deepcopy(value, memo))
    return made
