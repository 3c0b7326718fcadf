"""A fresh copy of what is verified, as one run finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autoaccum.accumulation.attributes import OwnAttributes
from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.copies import ModuleState
from autoaccum.accumulation.digest import tensor_hooks
from autoaccum.accumulation.draws.joins import DrawMismatch
from autoaccum.accumulation.randomness import Generator, own_generators
from autoaccum.accumulation.recovery import find_shortage
from autoaccum.accumulation.routers import leave_out_balancing
from autoaccum.errors import AutoaccumError
from autoaccum.verification.laboratory.outcomes import Change, Outcome
from autoaccum.verification.laboratory.specimen import Specimen, Trained
from autoaccum.workload.tracebacks import blame_workload, exit_blamed


class Bench:
    """A fresh copy of the specimen as one run finds it, what it holds on to, and what it came to."""

    def __init__(self, specimen: Specimen, change: Change) -> None:
        self.change, self.precision, self.device = change, specimen.precision, specimen.device
        self.trained: Trained = specimen.fresh()
        for name, module in self.trained.model.named_modules():
            if name in change.rest:
                module.eval()
        if specimen.workload.batchnorm == "frozen":
            for norm in find_batchnorms(self.trained.model, self.trained.objective.criterion_module):
                norm.training = False
        if change.unbalanced:
            leave_out_balancing(self.trained.model)
        if change.unhooked:
            for parameter in self.trained.model.parameters():
                for hooks in tensor_hooks(parameter):
                    (hooks or {}).clear()
        self.scale = specimen.loss_scale
        self._specimen = specimen
        self._kept: tuple[ModuleState, OwnAttributes] | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Of the model, by name, tied ones once."""
        return dict(self.trained.model.named_parameters())

    @property
    def generators(self) -> list[Generator]:
        """That modules of this copy keep."""
        return own_generators(module for root in self.trained.roots.values() for module in root.modules())

    def telling(self, begin: Callable[[int, Iterable[Generator]], None]) -> Callable[[int], None]:
        """`begin` of a part, told of them as well."""
        own = self.generators
        return lambda index: begin(index, own)

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of the gradients there are now, without the loss scale."""
        found = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {name: None if one is None else one.detach().clone() for name, one in found.items()}

    def outcome(
        self, loss: float, terms: Mapping[str, float], connected: frozenset[str], gradients: dict[str, Tensor | None]
    ) -> Outcome:
        """What the run came to."""
        roots = self.trained.roots
        buffers = {
            name: tensor.detach().clone()
            for prefix, root in roots.items()
            for name, tensor in root.named_buffers(prefix=prefix)
        }
        parameters = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        state = () if self._kept is None else tuple(self._kept[1].changed())
        return Outcome(loss, dict(terms), connected, gradients, buffers, parameters, state)

    def backward(self, loss: Tensor) -> None:
        """Leave the gradient of `loss` in `.grad`, by way of the loss scale where there is one."""
        if loss.requires_grad:
            torch.autograd.backward(loss * self.scale if self.scale != 1.0 else loss)
        if self.scale != 1.0:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the run; see `Specimen.running`."""
        with self._specimen.running():
            roots = {**self.trained.roots, **self._specimen.beside}
            modules = (module for root in roots.values() for module in root.modules())
            self._kept = ModuleState(modules), OwnAttributes(roots)
            yield

    def begin_anew(self) -> None:
        """Put buffers, modes and plain attributes back to what the run began with."""
        for state in self._kept or ():
            state.restore()


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Show what the user's code raises as theirs; draws that do not match, and memory, come through as they are."""
    try:
        with exit_blamed(doing):
            yield
    except (AutoaccumError, DrawMismatch):
        raise
    except Exception as error:
        if find_shortage(error) is not None:
            raise
        raise blame_workload(error, doing) from error
