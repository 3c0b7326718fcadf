"""A cache of operator calls: tensors of the same shapes, strides and dtypes give results of the same form.

A training step repeats operators from layer to layer and from one micro-batch to the next. PyTorch's own cache of fake
operators takes longer to build its key than most operators take; this one caches fewer operators, with cheaper keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.simulation.trace_records import MemoryStep
from autoaccum.simulation.tracing.values import find_tensors

ResultMaker = Callable[[Sequence[Any]], Any]
"""Makes the result of a call from its arguments."""

_NOT_CACHED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
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


@dataclass(slots=True, eq=False)
class CachedCall:
    """What calls with one key have in common.

    Attributes:
        func: The operator, which has to live as long as its number in the key counts.
        make: Makes the result.
        on_card: Whether the result is one tensor, on the card.
        steps: What the kernel allocates, outside and within a backward pass; None: not known yet.
        decides: Whether the key alone decides what such a call does, whatever values are known.
    """

    func: Any
    make: ResultMaker
    on_card: bool
    steps: list[Sequence[MemoryStep] | None] = field(default_factory=lambda: [None, None])
    decides: bool = False


class OperatorCache:
    """Caches the calls of one simulation; `make` makes its fake tensors (`FakeCudaMode._make`).

    Attributes:
        calls: The cached calls, by their keys.
    """

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self._make = make
        self.calls: dict[Any, CachedCall] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a key that determines the form of the result; None if the call cannot be cached."""
        key: list[Any] = [id(func)]  # The hash of an operator is computed in Python.
        try:
            _describe(args, key)
            if kwargs:
                for name, value in kwargs.items():
                    key.append(name)
                    _describe((value,), key)
        except _NotCacheableError:
            return None
        return tuple(key)

    def add(self, key: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> CachedCall | None:
        """Cache a call and its result, if calls of this operator can be cached; what is written to `out=` cannot."""
        if func in _CHANGES_STORAGES or any(tag in func.tags for tag in _NOT_CACHED):
            return None
        given = {id(tensor) for tensor in find_tensors(kwargs.values())}
        if given and any(id(tensor) in given for tensor in find_tensors([out])):
            return None
        is_several = isinstance(out, tuple | list)
        makers = [self._part_maker(args, part) for part in (out if is_several else [out])]
        parts = [maker for maker in makers if maker is not None]
        if len(parts) < len(makers) or (is_several and _share_storages(args, out)):
            return None
        kind = list if isinstance(out, list) else tuple  # Those that run in Python, as layer_norm, return named tuples.
        make = (lambda args: kind(part(args) for part in parts)) if is_several else parts[0]
        on_card = isinstance(out, FakeTensor) and out.fake_device.type == "cuda"
        self.calls[key] = CachedCall(func, make, on_card)
        return self.calls[key]

    def _part_maker(self, args: Sequence[Any], out: Any) -> ResultMaker | None:
        if out is None or type(out) is int:
            return lambda args: out
        if not isinstance(out, FakeTensor) or out.constant is not None or out.layout is not torch.strided:
            return None
        for index, arg in enumerate(args):
            if arg is out:
                return lambda args: args[index]
        if out.fake_device.type not in ("cuda", "cpu"):
            return None
        device = out.fake_device
        shape, stride, dtype, make = tuple(out.shape), out.stride(), out.dtype, self._make
        storage, offset = out.untyped_storage()._cdata, out.storage_offset()
        for index, arg in enumerate(args):
            if isinstance(arg, FakeTensor) and arg.untyped_storage()._cdata == storage:
                return lambda args: make(shape, stride, dtype, args[index], offset, device=device)
        if offset or any(arg.untyped_storage()._cdata == storage for arg in find_tensors(args)):
            return None
        nbytes = out.untyped_storage().nbytes()
        return lambda args: make(shape, stride, dtype, nbytes=nbytes, device=device)


class _NotCacheableError(Exception):
    """An argument does not determine the form of the result."""


def _describe(values: Any, key: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor or (kind not in _PLAIN and isinstance(value, FakeTensor)):  # Packed weights have a class.
            if value.constant is not None or value.dtype.is_complex or value.layout is not torch.strided:
                raise _NotCacheableError
            place = value.storage_offset(), value.fake_device
            key.append((value.shape, value.stride(), value.dtype, *place, value.requires_grad))
        elif kind in _PLAIN:
            key.append(kind)
            key.append(value)
        elif kind is list or kind is tuple:
            key.append(len(value))
            _describe(value, key)
        else:
            raise _NotCacheableError


def _share_storages(args: Sequence[Any], out: Sequence[Any]) -> bool:
    """Return whether two results share a storage that belongs to no argument."""
    inputs = {tensor.untyped_storage()._cdata for tensor in find_tensors(args)}
    outputs = [tensor.untyped_storage()._cdata for tensor in out if isinstance(tensor, Tensor)]
    new = [storage for storage in outputs if storage not in inputs]
    return len(set(new)) < len(new)
