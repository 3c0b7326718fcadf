"""Copies of a model and its loss, and fixed seeds, for experiments that must not change them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum.sources.objective import Objective
from autoaccum.sources.pytree import map_tensors

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_LARGE = 2**27
"""Parameters of a model that is too large for copies in float64."""


@contextmanager
def fixed_seeds() -> Iterator[None]:
    """Seed Python, NumPy and PyTorch on the CPU and silence warnings within; restore the RNG states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the GPUs too.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: for small batches, where threads that wait for each other lose time to processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def copy_module(module: ModuleT, memo: dict[int, Any] | None = None) -> ModuleT:
    """Return a deep copy of `module`; `memo` is that of `copy.deepcopy`.

    Tensors that a forward pass has left in attributes (attention maps, an auxiliary loss, the weight of `weight_norm`)
    are copied without their graph. Errors raised while copying other attributes are passed on.
    """
    copies = {} if memo is None else memo
    for inner in module.modules():
        for value in vars(inner).values():
            copies.update({id(tensor): tensor.detach().clone() for tensor in _computed(value)})
    return copy.deepcopy(module, copies)


def empty_tensors(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy_module` that makes a copy with empty parameters and buffers."""
    buffers = {id(buffer): buffer.new_empty(0) for buffer in model.buffers()}
    return buffers | {
        id(parameter): nn.Parameter(torch.empty(0), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }


def is_large(model: nn.Module) -> bool:
    """Return whether a copy of `model` in float64 would take more than 1 GiB."""
    return sum(parameter.numel() for parameter in model.parameters()) > _LARGE


def cast_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy of `batch` with its floating-point tensors in `dtype`; None keeps their dtypes."""

    def cast(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    return map_tensors(batch, cast)


def copy_objective(
    objective: Objective,
    change_module: Callable[[nn.Module], nn.Module] = lambda module: module,
    change_tensors: Callable[[dict[str, Any]], dict[str, Any]] = lambda tensors: tensors,
) -> Objective:
    """Return the objective with a copy of its criterion: a changed module, or a partial with changed tensors."""
    if objective.criterion is None:
        return objective
    function: Any = objective.criterion.function
    if isinstance(function, nn.Module):
        function = change_module(copy.deepcopy(function))
    elif isinstance(function, functools.partial):
        function = functools.partial(function.func, *function.args, **change_tensors(dict(function.keywords)))
    return dataclasses.replace(objective, loss=dataclasses.replace(objective.criterion, function=function))


def objective_in_float64(objective: Objective) -> Objective:
    """Return the objective with a copy of its criterion in float64."""
    return copy_objective(objective, nn.Module.double, lambda tensors: cast_batch(tensors, torch.float64))


def _computed(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from [value] if value.grad_fn is not None else []
    elif type(value) in (dict, list, tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _computed(entry)
