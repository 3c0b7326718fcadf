"""Functions of PyTorch that ask C++ for a device, or for values, by way of Python; and the compiler."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from autoaccum.devices.simulated.impersonation import DEVICE, check_index
from autoaccum.devices.simulated.patches import replaced
from autoaccum.devices.simulated.placement import convert_module
from autoaccum.devices.simulated.values import (
    SimulationLimit,
    asked_by_torch,
    known_array,
    known_list,
    unknown_value,
)

COMPILED = (
    "the model is compiled (torch.compile), and its eager step is what is predicted: compiled, it takes less as a rule"
)
_META = torch.device("meta")
_AS_TENSOR, _TENSOR = torch.as_tensor, torch.tensor
_NATIVE_GENERATOR: Any = torch.Generator


def adapt_functions(notices: dict[str, None], stack: ExitStack) -> None:
    """Exchange them until `stack` is closed."""
    for owner, name, value in (
        (torch.Tensor, "to", _to),
        (torch.Tensor, "cuda", _cuda),
        (torch, "Generator", Generator),
        (FakeTensor, "tolist", known_list),
        (torch, "tensor", _tensor),
        (torch, "as_tensor", _as_tensor),
        (torch, "compile", partial(_eager, notices)),
        (torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor),
        (FakeTensor, "numpy", known_array),
        (FakeTensor, "__array__", known_array),
        (FakeTensor, "__dlpack__", _unreadable),
        (FakeTensor, "data_ptr", _data_ptr),
        (torch.nn.Module, "_apply", convert_module),
        (torch.nn.DataParallel, "forward", _scattered),
        (torch.distributions.Distribution, "_validate_args", False),  # They would read values of the card.
    ):
        stack.enter_context(replaced(owner, name, value))


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`, with the card as C++ knows it.

    By its index, since a CPU build would ask the driver which card `cuda` means; and as `meta` for a tensor that is
    there already, which would be copied otherwise.
    """
    here = isinstance(tensor, FakeTensor) and tensor.device == DEVICE
    args = tuple(_as_seen(arg, here) for arg in args)
    kwargs = {name: _as_seen(value, here) for name, value in kwargs.items()}
    return torch._C.TensorBase.to(tensor, *args, **kwargs)


def _as_seen(value: Any, here: bool) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):  # `.cuda(0)`
        value = torch.device("cuda", value)
    if isinstance(value, str | torch.device) and str(value).startswith("cuda"):
        device = torch.device(value)
        if device.index in (None, 0):
            return _META if here else DEVICE
    return value


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return _to(data, **{name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None})
    return _AS_TENSOR(_read(data), dtype=dtype, device=_as_seen(device, here=False))


def _tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _TENSOR(_read(data), *args, **kwargs)


def _read(data: Any) -> Any:
    """A nest of numbers without those of the card, which C++ would ask for their values unseen."""
    if not isinstance(data, list | tuple) or not any(isinstance(one, FakeTensor | list | tuple) for one in data):
        return data
    return [one.tolist() if isinstance(one, FakeTensor) else _read(one) for one in data]


def _cuda(tensor: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    return _to(tensor, DEVICE if device is None else device)


class _Generators(type(_NATIVE_GENERATOR)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _NATIVE_GENERATOR)


class Generator(_NATIVE_GENERATOR, metaclass=_Generators):  # type: ignore[misc]
    """`torch.Generator`; one for the card is the host's, whose numbers nobody sees."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """A generator for a device."""
        return super().__new__(cls, "cpu" if torch.device(device).type == "cuda" else device)

    def __init__(self, device: Any = "cpu") -> None:
        check_index(device)
        asked = torch.device(device)
        self._asked = DEVICE if asked.type == "cuda" else asked

    @property
    def device(self) -> torch.device:
        """Return what it was asked for."""
        return self._asked


def _unreadable(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    raise unknown_value(tensor)


def _data_ptr(tensor: torch.Tensor) -> int:
    """A number of its own for each place, for those who only compare; 0 for who asks whether there is memory."""
    asker = asked_by_torch()
    if asker is None:
        raise SimulationLimit("the address of a tensor on the card is taken, as for a kernel of one's own")
    place = tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize
    return 0 if asker == "torch._tensor" else place


def _scattered(module: torch.nn.DataParallel[Any], *_: Any, **__: Any) -> NoReturn:
    raise SimulationLimit(
        "nn.DataParallel divides a batch among cards, and one card is simulated",
        hint="plan the module without it: have model() return what it wraps",
    )


def _eager(notices: dict[str, None], model: Any = None, **options: Any) -> Any:
    """`torch.compile`, as a function or as a decorator with options: there is no kernel to compile for.

    It is said once what was compiled runs: libraries compile functions as they are imported that nobody calls.
    """
    if model is None:
        return partial(_eager, notices)

    def note(*_: Any) -> None:
        notices[COMPILED] = None

    if isinstance(model, torch.nn.Module):
        model.register_forward_pre_hook(note)
        return model

    @functools.wraps(model)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not given or any(leaf.is_cuda for leaf in given):  # What prepares a batch is not the step's.
            note()
        return model(*args, **kwargs)

    return run
