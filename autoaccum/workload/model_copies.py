"""Experiments on a model without touching it: copies of the model and its loss, and fixed seeds."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum.workload.objective import Objective
from autoaccum.workload.pytree import map_tensors
from autoaccum.workload.tracebacks import user_code

if TYPE_CHECKING:
    from autoaccum.workload.spec import Workload

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_LARGE = 2**27
"""Parameters of a model that is too large for copies in float64."""


@contextmanager
def fixed_seeds() -> Iterator[None]:
    """Run with fixed seeds of Python, NumPy and torch on the CPU, silence warnings, and put the states back."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed the GPUs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


def copy_module(module: ModuleT, memo: dict[int, Any] | None = None) -> ModuleT:
    """A deep copy of `module`.

    What a forward has left in attributes (attention maps, an auxiliary loss, the weight of `weight_norm`) comes without
    its graph.

    Args:
        module: The module; what copying its other attributes raises comes through as it is.
        memo: What `copy.deepcopy` takes for known.
    """
    known = {} if memo is None else memo
    for held in module.modules():
        for value in vars(held).values():
            known.update({id(tensor): tensor.detach().clone() for tensor in _computed(value)})
    return copy.deepcopy(module, known)


def copy_workload_model(workload: Workload) -> tuple[nn.Module, bool]:
    """A model of the workload, in training mode and with ties broken, and whether it is nobody else's.

    One that cannot be copied comes as it is.
    """
    with user_code("model()"):
        model = workload.make_model()
    # A function may return the same model each time, which would then be the caller's.
    copied = isinstance(workload.model, nn.Module | type)
    if not copied:
        model, copied = copy_model(model)
    if copied:
        prepare_copy(model)
    return model, copied


def copy_model(model: nn.Module) -> tuple[nn.Module, bool]:
    """A copy of `model` and True, or itself and False."""
    try:
        return copy_module(model), True
    except Exception:  # `__deepcopy__` may be the user's
        return model, False


def prepare_copy(model: nn.Module) -> None:
    """Put a copy into training mode, unless it is, and fill what is constant in it."""
    if not model.training:
        model.train()
    _break_ties(model)


def is_large(model: nn.Module) -> bool:
    """Whether a copy of it in float64 would take more than a GiB."""
    return sum(parameter.numel() for parameter in model.parameters()) > _LARGE


def cast_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    """A copy of `batch`, its floating tensors in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    return map_tensors(batch, cast)


def _break_ties(model: nn.Module) -> None:
    """Fill weights that are constant, such as a head that starts at zero: all samples would have the same loss."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.ndim > 1
                and parameter.is_floating_point()
                and bool((parameter == parameter.flatten()[:1]).all())
            ):
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.add_(noise.to(parameter.device, parameter.dtype))


def objective_in_float64(objective: Objective) -> Objective:
    """The objective with a copy of its criterion whose buffers are in float64."""
    criterion = objective.criterion
    if criterion is None:
        return objective
    function: Any = criterion.function
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).double()
    elif isinstance(function, functools.partial):
        function = functools.partial(function.func, *function.args, **map_tensors(dict(function.keywords), _double))
    return dataclasses.replace(objective, criterion=dataclasses.replace(criterion, function=function))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _computed(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from [value] if value.grad_fn is not None else []
    elif type(value) in (dict, list, tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _computed(entry)
