"""Calls of operators, and the workspaces that they take; sizes are in workspace_sizes.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autoaccum.simulation.releases import Release
from autoaccum.simulation.trace_records import MemoryStep, OutputAllocated, Workspace

Tensor: TypeAlias = Any
Signature = Mapping[str, tuple[int, Any]]


def ceil_div(value: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def power_below(number: int) -> int:
    """Return the largest power of two that is not above `number`; 1 for numbers below 1."""
    return 1 << max(number.bit_length() - 1, 0)


@dataclass(frozen=True)
class OperatorCall:
    """An operator with its arguments and outputs; `signature` has position and default of each parameter."""

    signature: Signature
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any
    torch_version: Release
    deterministic: bool = False

    def __getitem__(self, name: str) -> Any:
        """Return the argument `name`, or its default; None if the overload has no such parameter."""
        position, default = self.signature.get(name, (len(self.args), None))
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @property
    def first(self) -> Tensor:
        """Return the first argument."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


Handler = Callable[[OperatorCall], Sequence[MemoryStep]]
"""Returns the workspaces of a call, in the order in which its kernels take and free them."""


def before_outputs(copies: Sequence[Workspace]) -> list[MemoryStep]:
    """Return `copies`, then the outputs: the operator lays out its inputs first."""
    return [*copies, OutputAllocated()] if copies else []


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the elements of `tensor`."""
    count: int = tensor.numel() * tensor.dtype.itemsize
    return count


def layout_copies(*tensors: Tensor | None, **memory_format: Any) -> list[Workspace]:
    """Return a copy for each tensor that is not contiguous in `memory_format`."""
    return [
        Workspace("layout_copy", (bytes_of(tensor),))
        for tensor in tensors
        if tensor is not None and not tensor.is_contiguous(**memory_format)
    ]


def accumulator_bytes(dtype: Any) -> int:
    """Return the bytes of the number in which values of `dtype` are summed (ATen/AccumulateType.h)."""
    size: int = dtype.itemsize
    return max(4, size)
