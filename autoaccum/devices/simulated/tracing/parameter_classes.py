"""Parameters of a class of their own on the simulated card, such as bitsandbytes' packed weights.

Such a class holds plain attributes beside its memory (scales, a code book), and its own `to` replaces that memory. On
the card it is a fake tensor that is an instance of the class as well.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.devices.simulated.torch_patches import patched
from autoaccum.devices.simulated.tracing.fake_cuda import DEVICE

_MAKE_SUBCLASS: Any = torch.Tensor._make_subclass
_DATA: Any = torch._C.TensorBase.data


def patch_parameter_classes(stack: ExitStack) -> None:
    """Let code make instances of such classes from fake tensors, until `stack` is closed."""
    stack.enter_context(patched(torch.Tensor, "_make_subclass", staticmethod(_make_subclass)))
    stack.enter_context(patched(FakeTensor, "data", property(_DATA.__get__, _set_data)))


def fake_parameter(parameter: nn.Parameter) -> FakeTensor:
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
    made: Any = data.detach()
    made.__class__ = _fake_class(cls)
    made._is_param = issubclass(cls, nn.Parameter)
    return made.requires_grad_(require_grad)


@cache
def _fake_class(cls: Any) -> Any:
    """Return the class of fake tensors of that class, under its name, by which libraries ask for it."""
    return type(cls.__name__, (FakeTensor, cls), {"__module__": cls.__module__})


def _set_data(tensor: FakeTensor, data: Tensor) -> None:
    """Set the memory of a tensor, and with it the device that Python sees."""
    _DATA.__set__(tensor, data)
    if isinstance(data, FakeTensor):
        tensor.fake_device = data.fake_device
