"""One call of an operator, and the workspaces that calls of many operators have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.trace import MemoryStep, OutputAllocated, Workspace

Signature = Mapping[str, tuple[int, Any]]


@dataclass(frozen=True)
class OperatorCall:
    """An operator with its arguments and outputs; `signature` has position and default of each parameter."""

    signature: Signature
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any
    torch_version: tuple[int, int]

    def __getitem__(self, name: str) -> Any:
        """Return the argument `name`, or its default; None if the overload has no such parameter."""
        position, default = self.signature.get(name, (len(self.args), None))
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @cached_property
    def first(self) -> Tensor:
        """Return the first argument."""
        tensor: Tensor = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return tensor


Handler = Callable[[OperatorCall], Sequence[MemoryStep]]
"""Returns the workspaces of a call, in the order in which its kernels take and free them."""
AttachedHandler = Callable[[OperatorCall], list[tuple[int, Workspace]]]
"""Returns workspaces that live as long as an output: the index of the output, and the workspace."""


def before_outputs(copies: Sequence[Workspace], call: OperatorCall) -> list[MemoryStep]:
    """Return `copies`, then the outputs: the operator lays out its inputs first."""
    if not copies:
        return []
    count = len(call.out) if isinstance(call.out, list | tuple) else 1
    return [*copies, *map(OutputAllocated, range(count))]


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the elements of `tensor`."""
    return tensor.numel() * tensor.dtype.itemsize


def layout_copies(
    *tensors: Tensor | None, memory_format: torch.memory_format = torch.contiguous_format
) -> list[Workspace]:
    """Return a copy for each tensor that is not laid out in `memory_format`."""
    return [
        Workspace("layout_copy", (bytes_of(tensor),))
        for tensor in tensors
        if isinstance(tensor, Tensor) and not tensor.is_contiguous(memory_format=memory_format)
    ]


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of the number in which values of `dtype` are summed (ATen/AccumulateType.h)."""
    return max(4, dtype.itemsize)
