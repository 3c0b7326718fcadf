"""Operators that were run before on tensors of the same form: what they return is known.

A training step repeats itself, from layer to layer and from one micro-batch to the next. PyTorch's own cache of fake
operators takes longer to make its key than most of them take; this one knows less, and passes the rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Remake = Callable[[Sequence[Any]], Any]
"""From the arguments of a call to what it returns."""

_PASSED_ON = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_aten = torch.ops.aten
_CHANGES_STORAGES = frozenset(
    {
        _aten.resize_.default,
        _aten.resize_as_.default,
        _aten.set_.source_Storage_storage_offset,
        _aten.set_.source_Tensor,
    }
)
_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex}
)


class OperatorCache:
    """Remembers the calls of one simulation, whose fake tensors `make` makes (`FakeCudaMode._make`)."""

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self._make = make
        self._known: dict[Any, Remake] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what tells calls apart as far as the form of the result goes; None where that is not enough."""
        key: list[Any] = [func]
        try:
            _describe(args, key)
            if kwargs:
                for name, value in kwargs.items():
                    key.append(name)
                    _describe((value,), key)
        except _Unknown:
            return None
        return tuple(key)

    def find(self, key: Any) -> Remake | None:
        """Return what remakes the result of a call with this key, if there was one."""
        return self._known.get(key)

    def learn(self, key: Any, func: Any, args: Sequence[Any], out: Any) -> None:
        """Remember a call and its result, unless that has to be made anew each time."""
        if func in _CHANGES_STORAGES or any(tag in func.tags for tag in _PASSED_ON):
            return
        remake = self._remake(args, out)
        if remake is not None:
            self._known[key] = remake

    def _remake(self, args: Sequence[Any], out: Any) -> Remake | None:
        if out is None:
            return lambda args: None
        if isinstance(out, Tensor):
            return self._remake_tensor(args, out)
        if type(out) not in (tuple, list):
            return None
        parts = [self._remake_part(args, one) for one in out]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts) or _share_storages(args, out):
            return None
        kind = type(out)
        return lambda args: kind(part(args) for part in whole)

    def _remake_part(self, args: Sequence[Any], one: Any) -> Remake | None:
        if one is None:
            return lambda args: None
        return self._remake_tensor(args, one) if isinstance(one, Tensor) else None

    def _remake_tensor(self, args: Sequence[Any], out: Tensor) -> Remake | None:
        if not isinstance(out, FakeTensor) or out.fake_device.type != "cuda" or out.layout is not torch.strided:
            return None
        for index, arg in enumerate(args):
            if arg is out:
                return lambda args: args[index]
        shape, stride, dtype, make = tuple(out.shape), out.stride(), out.dtype, self._make
        storage, offset = out.untyped_storage()._cdata, out.storage_offset()
        for index, arg in enumerate(args):
            if isinstance(arg, FakeTensor) and arg.untyped_storage()._cdata == storage:
                return lambda args: make(shape, stride, dtype, args[index], offset)
        if any(arg.untyped_storage()._cdata == storage for arg in _tensors(args)):
            return None
        if offset:
            return None
        nbytes = out.untyped_storage().nbytes()
        return lambda args: make(shape, stride, dtype, nbytes=nbytes)


class _Unknown(Exception):
    """An argument whose form says too little."""


def _describe(values: Any, key: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.dtype.is_complex or value.layout is not torch.strided:
                raise _Unknown
            key.append(
                (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.storage_offset(),
                    value.fake_device,
                    value.requires_grad,
                )
            )
        elif kind in _PLAIN:
            key.append(kind)
            key.append(value)
        elif kind is list or kind is tuple:
            key.append(len(value))
            _describe(value, key)
        else:
            raise _Unknown


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _share_storages(args: Sequence[Any], out: Sequence[Any]) -> bool:
    """Return whether two results are of one storage that is none of the arguments'."""
    given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    made = [one.untyped_storage()._cdata for one in out if isinstance(one, Tensor)]
    fresh = [storage for storage in made if storage not in given]
    return len(set(fresh)) < len(fresh)
