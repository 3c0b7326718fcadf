"""Workspaces of operators: the calls that take them, and the rules for their sizes.

The process that replays traces needs this module and the rules, so that they do not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from autoaccum.simulation.cards import Card
from autoaccum.simulation.trace_records import MemoryStep, OutputAllocated, Workspace

Tensor: TypeAlias = Any
Numbers = tuple[int, ...]
Signature = Mapping[str, tuple[int, Any]]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The size of one workspace: memory that a kernel takes in addition to its tensors, as one block.

    Attributes:
        bytes: The bytes that are probably requested from the allocator; 0 if the kernel needs none at this size.
        band_bytes: How far off `bytes` may be, in either direction.
        measured: True if the bytes are certain. For most rules they follow from a formula in PyTorch's source, which
            was worked out by hand and not compared with a card. False for a guess, which has a band.
        optional: True if the kernel, or another one in its place, runs without this workspace where memory is short.
    """

    bytes: int
    band_bytes: int = 0
    measured: bool = True
    optional: bool = False


Rule = Callable[[Numbers, Card, tuple[int, int]], Estimate]
"""Turns the numbers of a workspace into its size on a card under a PyTorch release such as (2, 15).

The docstring of a rule says what the workspace holds, and what its numbers are."""


def by_name(*rules: Rule) -> dict[str, Rule]:
    """Return the rules by the names of their functions, which a `Workspace` refers to."""
    return {rule.__name__: rule for rule in rules}


def product_rule(factor: int = 1) -> Rule:
    """Return the rule that multiplies all numbers, and the product by `factor`."""

    def rule(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
        return Estimate(bytes=factor * prod(numbers))

    return rule


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
    torch_version: tuple[int, int]
    deterministic: bool = False
    strictly_deterministic: bool = False

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
