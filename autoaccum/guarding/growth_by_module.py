"""Find the deepest modules that explain a growth, with one name for modules that differ only in numbers."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from autoaccum.devices.explanation import Category, Holding
from autoaccum.workload.module_names import common_name, compact_names, mask_numbers

PERSISTENT: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer_state", "averages")

_LITTLE = 0.1
"""A module with no more than this share of the changes in its parent is counted with the parent."""

_MOST = 3
"""More modules than this are named by the module that contains them."""

_NEARLY_ALL = 0.8


@dataclass(frozen=True)
class Difference:
    """The holdings of one module in one category, before and now; the path of the model itself is empty."""

    category: Category
    module: str
    before: tuple[Holding, ...] = ()
    now: tuple[Holding, ...] = ()

    @property
    def parts(self) -> list[str]:
        """The parts of its path."""
        return self.module.split(".") if self.module else []

    @property
    def before_bytes(self) -> int:
        """The bytes held before."""
        return sum(holding.bytes for holding in self.before)

    @property
    def bytes(self) -> int:
        """The growth in bytes."""
        return sum(holding.bytes for holding in self.now) - self.before_bytes


@dataclass(frozen=True)
class Share:
    """A part of a growth.

    Attributes:
        module: The module, with all modules in it, named as in `ModuleShare.name`.
        differences: All differences in these modules, with those that are 0.
    """

    module: str
    differences: tuple[Difference, ...]

    @property
    def bytes(self) -> int:
        """The growth in bytes."""
        return _net(self.differences)


def attribute_to_modules(differences: Sequence[Difference]) -> list[Share]:
    """Split the growth of one category among the deepest modules that explain it.

    Modules that differ only in numbers are treated as one. A growth stays with the containing module if all in it grew
    alike, if both it and its children have a part, or if too many children do. What belongs to no module is a share of
    its own. There is one difference per module, also where nothing changed.
    """
    outside = [Share("", (row,)) for row in differences if not row.module and row.bytes]
    inside = [row for row in differences if row.module]
    paths = {".".join(row.parts[:depth]) for row in inside for depth in range(1, len(row.parts) + 1)}
    return [*outside, *_split(inside, 0, paths)]


def _split(rows: Sequence[Difference], depth: int, paths: Set[str]) -> list[Share]:
    """Split what grew in a module, or in several that differ only in numbers."""
    changed = [row for row in rows if row.bytes]
    children: dict[str, list[Difference]] = defaultdict(list)
    for row in rows:
        children[mask_numbers(row.parts[depth]) if len(row.parts) > depth else ""].append(row)
    own = abs(_net(children.pop("", [])))
    nets = {name: abs(_net(child)) for name, child in children.items()}
    little = _LITTLE * (sum(nets.values()) + own)
    large = [child for name, child in children.items() if nets[name] > little]
    together = own > little or not 0 < len(large) <= _MOST or (len(large) > 1 and _is_even(rows, deep=depth > 0))
    if not changed or together:
        return [Share(_name(changed, depth, paths), tuple(rows))] if changed else []
    shares = []
    for child in large:
        numbered = {row.parts[depth] for row in child if row.bytes}
        shares += _split([row for row in child if row.parts[depth] in numbered], depth + 1, paths)
    if sum(abs(share.bytes) > little for share in shares) > _MOST:
        shares = [Share(_name(child, depth + 1, paths), tuple(child)) for child in large]
    taken = {id(row) for child in large for row in child}
    rest = tuple(row for row in changed if id(row) not in taken)
    return [*shares, *([Share(_name(rest, depth, paths), rest)] if rest else [])]


def _is_even(rows: Sequence[Difference], *, deep: bool) -> bool:
    """Return whether nearly all grew by about the same factor, or all is new (in a module, or persistent memory)."""
    grown, before = _net(rows), sum(row.before_bytes for row in rows)
    if not before:
        return deep or rows[0].category in PERSISTENT
    if not grown:
        return False
    # The growth factor of each, relative to the growth factor of all.
    factors = [(row, row.bytes / row.before_bytes * before / grown) for row in rows if row.before_bytes]
    alike = [row for row, factor in factors if 0.5 <= factor <= 2]
    return _net(alike) / grown >= _NEARLY_ALL and sum(row.before_bytes for row in alike) >= _NEARLY_ALL * before


def _name(rows: Iterable[Difference], depth: int, paths: Set[str]) -> str:
    """Name the modules of this depth that contain these differences, with `*` for numbers that stand for all of them.

    Several that have no common name are named by the module around them, as are numbered layers of several classes; the
    name of the whole model is empty.
    """
    inside = [row for row in rows if row.bytes]
    kinds = {holding.kind for row in inside if len(row.parts) == depth for holding in (*row.before, *row.now)}
    depth -= depth > 1 and len(kinds) > 1 and inside[0].parts[depth - 1].isdecimal()
    names = list(dict.fromkeys(".".join(row.parts[:depth]) for row in inside))
    if len({mask_numbers(name) for name in names}) > 1:  # The remainder of several modules.
        return ""
    starred = common_name(names)
    alike = re.compile(r"\d+".join(map(re.escape, starred.split("*"))))
    if not any(alike.fullmatch(path) for path in paths - set(names)):
        return starred if starred.strip("*.") else ""
    patterns = compact_names(names)
    around = os.path.commonprefix([name.split(".") for name in names])
    return patterns[0][0] if len(patterns) == 1 else ".".join(around)


def _net(rows: Iterable[Difference]) -> int:
    return sum(row.bytes for row in rows)
