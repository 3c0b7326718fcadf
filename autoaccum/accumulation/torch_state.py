"""All that torch knows of modules and of an optimizer: set aside, and put back as the same objects and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.copies import StateCopy
from autoaccum.accumulation.digest import tensor_hooks
from autoaccum.accumulation.randomness import Generator, RandomState, own_generators, seeded_devices

_REGISTERED = frozenset(vars(nn.Module())) - {"training"}


class TorchState:
    """What modules register, with its values, and what belongs to it.

    Parameters, buffers (replaced, registered and renamed ones too), submodules, modes, hooks of modules and tensors,
    `.grad`, `requires_grad`, tensors that are attributes of modules, the optimizer with all it keeps, and the
    generators of Python, NumPy, torch, every card, and those that modules own.

    Args:
        roots: The modules; all within them count.
        optimizer: The optimizer, unless there is none.
        generators: More generators.
        random: Whether generators count.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        optimizer: Optimizer | None = None,
        generators: Iterable[Generator] = (),
        *,
        random: bool = True,
    ) -> None:
        modules = list({id(module): module for root in roots for module in root.modules()}.values())
        self._modes = [(module, module.training) for module in modules]
        self._attributes = [(vars(module), _kept(vars(module))) for module in modules]
        parameters: list[Tensor] = [one for module in modules for one in module.parameters(recurse=False)]
        parameters += [one for group in (optimizer.param_groups if optimizer else ()) for one in group["params"]]
        self._parameters = [_Parameter(one) for one in {id(one): one for one in parameters}.values()]
        tensors = [*parameters, *(one for module in modules for one in module.buffers(recurse=False))]
        kept = [list(before.values()) for _, before in self._attributes]
        beside = [(one.grad, vars(one), *tensor_hooks(one)) for one in parameters]
        self._copy = StateCopy([tensors, kept, optimizer, beside])
        self._random = RandomState(seeded_devices(), [*own_generators(modules), *generators]) if random else None

    def restore(self) -> None:
        """Put everything back; may be called again when it was interrupted."""
        for attributes, before in self._attributes:
            attributes.update(before)
        self._copy.restore()
        for module, training in self._modes:
            module.training = training
        for parameter in self._parameters:
            parameter.restore()
        if self._random is not None:
            self._random.restore()


class _Parameter:
    """What belongs to a parameter besides its values."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._requires_grad, self._gradient = tensor.requires_grad, tensor.grad
        self._hooks = tensor_hooks(tensor)

    def restore(self) -> None:
        if self._tensor.is_leaf:
            self._tensor.requires_grad_(self._requires_grad)
        self._tensor.grad = self._gradient
        for name, before in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), self._hooks, strict=True):
            if getattr(self._tensor, name, None) is not before:
                setattr(self._tensor, name, before)


def _kept(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name in _REGISTERED or isinstance(value, Tensor)}
