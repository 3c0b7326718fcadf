"""What of a measurement is kept in detail: the modules that matter, and the rest of each purpose as one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Set
from typing import NamedTuple

from autoaccum.devices.explanation import CATEGORIES, Category, Holding
from autoaccum.guarding.records import Measurement
from autoaccum.workload.module_names import numberless

_LEAST_SHARE = 1000
_NUMBER = re.compile("([0-9]+)")


class Group(NamedTuple):
    """What holdings have in common that are kept or folded together; `module` has `*` for each number in it."""

    category: Category
    module: str
    kind: str
    dtype: str
    op: str


def group_of(holding: Holding) -> Group:
    """The group that a holding belongs to."""
    return Group(holding.category, numberless(holding.module), holding.kind, holding.dtype, holding.op)


def fold(measurement: Measurement, keep: Set[Group] = frozenset()) -> Measurement:
    """The same with its holdings as a lock keeps them, in order: groups below 1/1000 of the peak are one per category.

    Such a one names no module, kind, dtype or operator. To fold twice changes nothing.

    Args:
        measurement: Any.
        keep: Groups that stay however small they are: those of a locked measurement that this one is compared with, so
            that none of them seems to be gone because it came to be a little below the bound.
    """
    sizes: dict[Group, int] = {}
    for holding in measurement.holdings:
        sizes[group_of(holding)] = sizes.get(group_of(holding), 0) + holding.bytes
    kept = {group for group, size in sizes.items() if size * _LEAST_SHARE >= measurement.peak_bytes} | keep
    folded = (
        holding if group_of(holding) in kept else Holding(category=holding.category, bytes=holding.bytes)
        for holding in measurement.holdings
    )
    return dataclasses.replace(measurement, holdings=in_order(folded))


def in_order(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    """By category, module (2 before 10), kind, dtype and operator; those that share all of these are one."""
    sizes: dict[Holding, int] = {}
    for holding in holdings:
        alike = dataclasses.replace(holding, bytes=0)
        sizes[alike] = sizes.get(alike, 0) + holding.bytes
    joined = (dataclasses.replace(alike, bytes=size) for alike, size in sizes.items())
    return tuple(sorted(joined, key=_place))


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts numbers in names by their value.

    >>> sorted(["h.10.up", "h.2.up"], key=natural)
    ['h.2.up', 'h.10.up']
    """
    return tuple((int(part) if part.isdecimal() and part.isascii() else -1, part) for part in _NUMBER.split(name))


def _place(holding: Holding) -> tuple[object, ...]:
    return CATEGORIES.index(holding.category), natural(holding.module), holding.kind, holding.dtype, holding.op
