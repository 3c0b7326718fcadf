"""State a model keeps in Python: neither parameter nor buffer, so that nothing can roll it back.

Found by a cheap fingerprint, taken before and after the first step; a heuristic that looks at plain values, at the
identity and version of tensors, and into containers and objects to a small depth.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum.accumulation.copies import is_plain_tensor
from autoaccum.workload import nests

_DEPTH = 3
_ENTRIES = 64
_INTERNAL = frozenset(vars(nn.Module())) | {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


class Fingerprint:
    """What the model keeps in Python attributes, and a sum of every parameter.

    torch's own modules keep nothing there; a `torch.Generator` is rolled back with the random states.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes = {
            f"{prefix}{'.' if prefix else ''}{name}": _token(value, _DEPTH)
            for prefix, module in model.named_modules()
            if not type(module).__module__.startswith("torch.")
            for name, value in vars(module).items()
            if name not in _INTERNAL
        }
        self._parameters = {
            name: repr(_summable(parameter).sum().tolist())
            for name, parameter in model.named_parameters()
            if is_plain_tensor(parameter) and not parameter.is_meta
        }

    def changed_attributes(self, later: Fingerprint) -> list[str]:
        """Names (`encoder.calls`) of attributes that came, went or changed."""
        names = [name for name, token in later._attributes.items() if self._attributes.get(name) != token]
        return names + [name for name in self._attributes if name not in later._attributes]

    def changed_parameters(self, later: Fingerprint) -> list[str]:
        """Names of parameters whose sum changed."""
        return [name for name, token in later._parameters.items() if self._parameters.get(name, token) != token]


def state_warning(before: Fingerprint, after: Fingerprint, is_batch_changed: bool) -> str | None:
    """One sentence that names what a rollback cannot restore; None when there is nothing."""
    attributes, parameters = before.changed_attributes(after), before.changed_parameters(after)
    found = []
    if attributes:
        found.append(f"Python attributes ({_listed(attributes)})")
    if parameters:
        found.append(f"parameters ({_listed(parameters)})")
    if is_batch_changed:
        found.append("the batch it is given")
    if not found:
        return None
    return (
        f"forward changes {' and '.join(found)}, which cannot be rolled back when memory runs out within a step: keep"
        " state in buffers (register_buffer), and change no inputs in place"
    )


def batch_versions(batches: Sequence[Any]) -> list[int]:
    """How often each tensor of `batches` was changed in place, and where views of it were."""
    return [tensor._version for tensor in nests.tensors(batches) if not tensor.is_inference()]


class _Identity:
    """Equal only to the token of the very same living object."""

    def __init__(self, value: Any) -> None:
        try:
            self._ref: Any = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _Identity) and mine is not None and mine is other._ref()

    def __hash__(self) -> int:
        return hash(_Identity)


def _token(value: Any, depth: int) -> Any:
    """Something that compares equal exactly when `value` has not changed, as far as can be seen cheaply."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, Tensor):
        return _Identity(value), None if value.is_inference() else value._version, value.shape
    if isinstance(value, np.ndarray):
        return _Identity(value), value.shape, hash(value.tobytes()) if value.size <= _ENTRIES else None
    if depth == 0:
        return _Identity(value)
    if isinstance(value, Mapping):
        return _tokens(value.keys(), depth), _tokens(value.values(), depth)
    if isinstance(value, list | tuple | deque | set | frozenset):
        return _tokens(value, depth)
    if isinstance(value, nn.Module) or callable(value):
        return _Identity(value)
    return _Identity(value), _token(getattr(value, "__dict__", None), depth - 1)


def _summable(parameter: Tensor) -> Tensor:
    """The parameter itself, or its bytes as integers: float8 and wide unsigned dtypes cannot be added up."""
    values = parameter.detach()
    is_tiny_float = values.is_floating_point() and values.itemsize == 1
    if is_tiny_float or values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return values.view((torch.int8, torch.int16, torch.int32, torch.int64)[values.itemsize.bit_length() - 1])
    return values


def _tokens(values: Iterable[Any], depth: int) -> Any:
    listed = list(values)
    return len(listed), [_token(value, depth - 1) for value in (*listed[:_ENTRIES], *listed[-1:])]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[: _ENTRIES // 8]) + (", ..." if len(names) > _ENTRIES // 8 else "")
