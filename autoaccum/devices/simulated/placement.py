"""Modules onto the card: parameters are exchanged, since a real one cannot become a fake one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from autoaccum.devices.simulated.values import SimulationLimit

_SHAPED = "have model() run one sample through before it returns"
_REPLACED_BY = "_autoaccum_replaced_by"


def convert_module(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` in its order, where a parameter that `fn` turns into a fake one is exchanged for a new one.

    One parameter under several names stays one. Attributes and hooks of a parameter go along.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = _convert(parameter, fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = _exchanged(buffer, fn)
    return module


def _convert(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> Any:
    if is_lazy(parameter):
        raise SimulationLimit("a parameter without a shape yet is put on the card (a lazy module's)", hint=_SHAPED)
    with torch.no_grad():
        known = _replacement(parameter)
        if known is not None:
            return known
        applied = fn(parameter)
        if applied is parameter:
            return parameter
        if not isinstance(applied, FakeTensor) and not isinstance(parameter, FakeTensor):
            parameter.data = applied
            if parameter.grad is not None:
                parameter.grad.data = fn(parameter.grad)
            return parameter
        made = nn.Parameter(applied, requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            made.grad = fn(parameter.grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks):
            setattr(made, hooks, getattr(parameter, hooks))
    for name, value in vars(parameter).items():
        if name not in vars(made) and name != _REPLACED_BY:
            setattr(made, name, value)
    _remember(parameter, made)
    return made


def _exchanged(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Any:
    known = _replacement(buffer)
    if known is not None:
        return known
    with torch.no_grad():
        applied = fn(buffer)
    if applied is not buffer:
        _remember(buffer, applied)
    return applied


def _replacement(tensor: Tensor) -> Any:
    reference = vars(tensor).get(_REPLACED_BY)
    return None if reference is None else reference()


def _remember(tensor: Tensor, replacement: Tensor) -> None:
    setattr(tensor, _REPLACED_BY, weakref.ref(replacement))
