"""A fresh copy of what is verified, as one run finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.digest import tensor_hooks
from autoaccum.accumulation.draws.joins import DrawMismatch
from autoaccum.accumulation.held_state import HeldState
from autoaccum.accumulation.randomness import Generator, own_generators
from autoaccum.accumulation.reach import find_reachable
from autoaccum.accumulation.recovery import find_shortage
from autoaccum.errors import AutoaccumError
from autoaccum.verification.laboratory.outcomes import Change, Outcome
from autoaccum.verification.laboratory.specimen import Specimen, Trained
from autoaccum.workload.tracebacks import blame_workload, exit_blamed

BESIDE = "<"
"""What the names of modules begin with that the user's functions hold and the model does not."""


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
        if change.unhooked:
            for parameter in self.trained.model.parameters():
                for hooks in tensor_hooks(parameter):
                    (hooks or {}).clear()
        self.scale = specimen.loss_scale
        objective, accumulate = self.trained.objective, specimen.workload.accumulate
        functions = [objective.loss_function, objective.weight_function, accumulate]
        if objective.criterion is not None:
            functions.append(objective.criterion.function)
        self.beside = _beside(functions, self.trained)
        self.held = HeldState({**self.trained.roots, **self.beside}, functions)

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
        """What the run came to; what it changed outside of its copy is put back."""
        roots = self.trained.roots
        buffers = {
            name: tensor.detach().clone()
            for prefix, root in roots.items()
            for name, tensor in root.named_buffers(prefix=prefix)
        }
        parameters = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        state = tuple(self.held.changed())
        self.held.restore()
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
    def put_back(self) -> Iterator[None]:
        """Put back what a run that failed has changed outside of its copy."""
        try:
            yield
        except BaseException:
            self.held.restore()
            raise


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


def _beside(functions: Sequence[Any], trained: Trained) -> dict[str, nn.Module]:
    """Modules that the user's functions hold, as a loss does its teacher."""
    known = {id(module) for root in trained.roots.values() for module in root.modules()}
    modules, _ = find_reachable([function for function in functions if function is not None])
    return {f"{BESIDE}{name}>": module for name, module in modules.items() if id(module) not in known}
