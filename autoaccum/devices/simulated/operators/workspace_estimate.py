"""The record that every workspace rule returns, and the arithmetic that rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from autoaccum.devices.simulated.cards import Card

Numbers = tuple[int, ...]


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
"""Turns the numbers of a workspace into its size on a card under a PyTorch release such as (2, 15)."""


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
