"""Modules, checkpoints and parameters of other classes that are moved to the simulated card."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from autoaccum.simulation.torch_patches import patch
from autoaccum.simulation.tracing.fake_cuda import DEVICE, check_index
from autoaccum.simulation.unsupported import UnsupportedError

_INITIALISE = "run one sample through the model in model(), before it is returned"
REPLACED_BY = "_autoaccum_replaced_by"
"""The attribute of a tensor with a weak reference to the one that took its place when it was moved."""
_ZIP = b"PK\x03\x04"
_MAKE_SUBCLASS: Any = Tensor._make_subclass
_DATA: Any = torch._C.TensorBase.data


def patch_placement(stack: ExitStack) -> None:
    """Patch how modules, files and parameters come to the card, until `stack` is closed.

    A parameter of a class of its own, as of bitsandbytes' packed weights, holds plain attributes beside its memory
    (scales, a code book), and its own `to` replaces that memory. On the card it is a fake tensor that is an instance of
    the class as well.
    """
    for owner, name, value in (
        (nn.Module, "_apply", _convert_module),
        *((owner, "load", partial(_load, torch.load)) for owner in (torch, torch.serialization)),
        (Tensor, "_make_subclass", staticmethod(_make_subclass)),
        (FakeTensor, "data", property(_DATA.__get__, _set_data)),
    ):
        patch(stack, owner, name, value)


def _convert_module(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace `nn.Module._apply`: a parameter that `fn` turns into a fake tensor becomes a new parameter.

    The order is the same. Tied parameters stay tied, and a parameter keeps its attributes and hooks.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = _convert_parameter(parameter, fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = _convert_buffer(buffer, fn)
    return module


def find_replacement(tensor: Any) -> Any:
    """Return the tensor that took the place of `tensor` when it was moved; None if it was not."""
    reference = vars(tensor).get(REPLACED_BY)
    return None if reference is None else reference()


def follow_parameters(optimizer: Any) -> None:
    """Let an optimizer, if there is one, hold the parameters that took the places of its own on a simulated card.

    Elsewhere, the parameters, their list and their state stay as they are.
    """
    for group in () if optimizer is None else optimizer.param_groups:
        for index, before in enumerate(group["params"]):
            if (after := find_replacement(before)) is not None:
                group["params"][index] = after
                if before in optimizer.state:
                    optimizer.state[after] = optimizer.state.pop(before)


def _convert_parameter(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> Any:
    if is_lazy(parameter):
        raise UnsupportedError("a lazy module's parameter is moved to the card before it has a shape", hint=_INITIALISE)
    with torch.no_grad():
        if (replacement := find_replacement(parameter)) is not None:
            return replacement
        was_meta = parameter.is_meta
        applied = fn(parameter)
        if applied is parameter:
            if was_meta or not parameter.is_meta:
                return parameter
            applied = _fake_parameter(parameter)
        if not isinstance(applied, FakeTensor) and not isinstance(parameter, FakeTensor):
            parameter.data = applied
            if parameter.grad is not None:
                parameter.grad.data = fn(parameter.grad)
            return parameter
        own_class = isinstance(applied, FakeTensor) and type(applied) is not FakeTensor
        converted: Any = applied if own_class else nn.Parameter(applied, requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            converted.grad = fn(parameter.grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks):
            setattr(converted, hooks, getattr(parameter, hooks))
    for name, value in vars(parameter).items():
        if name not in vars(converted) and name != REPLACED_BY:
            setattr(converted, name, value)
    setattr(parameter, REPLACED_BY, weakref.ref(converted))
    return converted


def _convert_buffer(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Any:
    if (replacement := find_replacement(buffer)) is not None:
        return replacement
    with torch.no_grad():
        applied = fn(buffer)
    if applied is not buffer:
        setattr(buffer, REPLACED_BY, weakref.ref(applied))
    return applied


def _load(load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
    """Load a file on the host, and move it to the card if `map_location` is the card.

    It is mapped into memory if it can be, since unread tensors then take none.
    """
    device = map_location.decode() if isinstance(map_location, bytes) else str(map_location)
    mapped = options.get("mmap") is None and _can_be_mapped(f)
    with _disable_current_modes():
        try:
            loaded = load(f, "cpu", *args, **({**options, "mmap": True} if mapped else options))
        except RuntimeError:  # C++ opens it by its path, and may find another than Python does.
            if not mapped:
                raise
            loaded = load(f, "cpu", *args, **options)
    if not device.startswith("cuda"):
        return loaded
    check_index(device)
    moved: dict[Any, Tensor] = {}
    return tree_map(partial(_move, moved), loaded)


def _move(moved: dict[Any, Tensor], value: Any) -> Any:
    """Move a tensor or a module to the card; tensors that are the same view of a storage stay one tensor."""
    if isinstance(value, nn.Module):
        return value._apply(partial(_move, moved))  # type: ignore[no-untyped-call]
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    key = value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride()
    if key not in moved:
        copy = value.detach().to(DEVICE)
        moved[key] = nn.Parameter(copy, value.requires_grad) if isinstance(value, nn.Parameter) else copy
    return moved[key]


def _can_be_mapped(f: Any) -> bool:
    if not isinstance(f, str | os.PathLike) or not Path(f).is_file():
        return False
    with Path(f).open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _fake_parameter(parameter: nn.Parameter) -> FakeTensor:
    """Return a fake parameter for a real one whose own `to` has put fake memory of the card into it."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with torch._C._DisableTorchDispatch():
        plain = parameter.detach().as_subclass(Tensor)
    made: FakeTensor = _make_subclass(type(parameter), FakeTensor(mode, plain, DEVICE), parameter.requires_grad)
    return made


def _make_subclass(cls: Any, data: Tensor, require_grad: bool = False, **how: Any) -> Any:
    """Run `Tensor._make_subclass`, which takes no fake tensor."""
    if not isinstance(data, FakeTensor) or issubclass(cls, FakeTensor):
        return _MAKE_SUBCLASS(cls, data, require_grad, **how)
    instance: Any = data.detach()
    instance.__class__ = _fake_class(cls)
    instance._is_param = issubclass(cls, nn.Parameter)
    return instance.requires_grad_(require_grad)


@cache
def _fake_class(cls: Any) -> Any:
    """Return the class of fake tensors of that class, under its name, by which libraries ask for it."""
    return type(cls.__name__, (FakeTensor, cls), {"__module__": cls.__module__})


def _set_data(tensor: FakeTensor, data: Tensor) -> None:
    """Set the memory of a tensor, and with it the device that Python sees."""
    _DATA.__set__(tensor, data)
    if isinstance(data, FakeTensor):
        tensor.fake_device = data.fake_device
