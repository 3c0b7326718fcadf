"""Update in host memory: there are the optimizer's state and, while it steps, the weights and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.gradients import HALF_DTYPES, GradientBuffers


class OffloadedOptimizer:
    """Lets an optimizer update copies of its parameters in host memory, and writes them back in place.

    Between updates the optimizer has its own parameters, so that its `state_dict` is as usual. Parameters of half
    precision are copies in float32, rounded: what an update adds is not lost, however small.

    Attributes:
        held_bytes: Of copies and state, and of the gradients of the last update.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: dict[int, tuple[Tensor, nn.Parameter]] = {}
        self.held_bytes = 0, 0

    @contextmanager
    def on_host(self, buffers: GradientBuffers | None) -> Iterator[None]:
        """Give the optimizer its parameters and gradients in host memory.

        Gradients are those in `buffers`, if any, or `.grad`, which is freed. A rollback that is to restore what the
        optimizer did in here comes before the end.
        """
        groups = [group["params"] for group in self._optimizer.param_groups]
        own = [list(parameters) for parameters in groups]
        copies = {one: self._copy(one) for parameters in own for one in parameters}
        sums = {} if buffers is None else buffers.sums
        for parameter, copy in copies.items():
            gradient, parameter.grad = sums.pop(parameter, parameter.grad), None
            copy.grad = None if gradient is None else gradient.to("cpu", copy.dtype)
            del gradient
        try:
            for parameters in groups:  # In place: an optimizer may hold the list itself.
                parameters[:] = [copies[parameter] for parameter in parameters]
            self._rename(copies)
            yield
            states = [value for copy in copies.values() for value in self._optimizer.state.get(copy, {}).values()]
            states = [value for value in states if isinstance(value, Tensor)]
            gradients = [copy.grad for copy in copies.values() if copy.grad is not None]
            held = (sum(one.nbytes for one in each) for each in ((*copies.values(), *states), gradients))
            self.held_bytes = next(held), next(held)
        finally:
            for parameters, before in zip(groups, own, strict=True):
                parameters[:] = before
            self._rename({copy: parameter for parameter, copy in copies.items()})
            for copy in copies.values():
                copy.grad = None

    def write_back(self) -> None:
        """Write the parameters that have been updated to the device."""
        with torch.no_grad():
            for parameter, copy in self._copies.values():
                if copy.grad is not None:
                    parameter.copy_(copy)

    def _copy(self, parameter: Tensor) -> nn.Parameter:
        """Return the copy of a parameter, with the values that it has now."""
        now = parameter.detach().to("cpu")
        held, copy = self._copies.get(id(parameter), (None, None))
        if copy is None or held is not parameter:
            dtype = torch.float32 if now.dtype in HALF_DTYPES else now.dtype
            copy = nn.Parameter(now.to(dtype, copy=True), requires_grad=parameter.requires_grad)
            self._copies[id(parameter)] = parameter, copy
            return copy
        with torch.no_grad():
            # What was changed meanwhile, as by loading a checkpoint; the rest keeps what rounding would take away.
            copy.copy_(torch.where(copy.to(now.dtype) == now, copy, now.to(copy.dtype)))
        return copy

    def _rename(self, names: Mapping[Tensor, Tensor]) -> None:
        """Let each parameter's state be that of its copy, in host memory; or the other way round."""
        state = self._optimizer.state
        for before, after in names.items():
            if before in state:
                entry = state[after] = state.pop(before)
                for name, value in entry.items():
                    if isinstance(value, Tensor) and value.device.type != "cpu":
                        entry[name] = value.to("cpu")
