"""Find the deepest modules that explain a growth, with one name for modules that differ only in numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, NamedTuple

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
        is_remainder: Whether it is what remains besides other shares.
    """

    module: str
    differences: tuple[Difference, ...]
    is_remainder: bool = False

    @property
    def bytes(self) -> int:
        """The growth in bytes."""
        return _net(self.differences)


def is_folded(holding: Holding) -> bool:
    """Return whether a holding is the sum that a lock keeps for all small modules."""
    return not (holding.module or holding.kind or holding.op or holding.dtype)


class _Group(NamedTuple):
    """Differences, and the number of parts of their paths that name the module which explains them."""

    rows: list[Difference]
    depth: int
    is_remainder: bool = False


def attribute_to_modules(differences: Sequence[Difference], modules: Iterable[str]) -> list[Share]:
    """Split the growth of one category among the deepest modules that explain it.

    Modules that differ only in numbers are treated as one, unless one of them has nearly all. A growth stays with the
    containing module if all in it grew alike, if both it and its children have a part, or if too many children do.
    What belongs to no module is a share of its own.

    `differences` has one row per module, also where nothing changed; `modules` are all modules, before and now.
    """
    known = _Names(modules, differences)
    inside = [difference for difference in differences if difference.module]
    outside = [difference for difference in differences if not difference.module and difference.bytes]
    groups = [*(_Group([difference], 0) for difference in outside), *_split(inside, 0)]
    return [
        Share(known.called(_changed(group.rows), group.depth), tuple(group.rows), group.is_remainder)
        for group in groups
    ]


def _split(rows: list[Difference], depth: int) -> list[_Group]:
    """Group what grew in a module, or in several that differ only in numbers."""
    changed = _changed(rows)
    children: dict[str, list[Difference]] = defaultdict(list)
    for row in rows:
        children[mask_numbers(row.parts[depth]) if len(row.parts) > depth else ""].append(row)
    own = abs(_net(children.pop("", [])))
    nets = {name: abs(_net(child)) for name, child in children.items()}
    little = _LITTLE * (sum(nets.values()) + own)
    large = [child for name, child in children.items() if nets[name] > little]
    together = own > little or not 0 < len(large) <= _MOST or (len(large) > 1 and _is_even(rows, deep=depth > 0))
    if not changed or together:
        return [_Group(rows, depth)] if changed else []
    groups = [group for child in large for group in _numbered(child, depth)]
    if sum(abs(_net(group.rows)) > little for group in groups) > _MOST:
        groups = [_Group(child, depth + 1) for child in large]
    taken = {id(row) for child in large for row in child}
    rest = [row for row in changed if id(row) not in taken]
    return [*groups, *([_Group(rest, depth, True)] if rest else [])]


def _numbered(rows: list[Difference], depth: int) -> list[_Group]:
    """Group modules that differ only in numbers: the one that has nearly all, or all that changed as one."""
    single: dict[str, list[Difference]] = defaultdict(list)
    for row in rows:
        single[row.parts[depth]].append(row)
    single = {name: own for name, own in single.items() if _changed(own)}
    nets = {name: abs(_net(own)) for name, own in single.items()}
    most = max(nets, key=lambda name: nets[name])
    if len(single) > 1 and nets[most] >= (1 - _LITTLE) * sum(nets.values()):
        rest = _changed(row for name, own in single.items() if name != most for row in own)
        return [*_split(single[most], depth + 1), *([_Group(rest, depth + 1, True)] if rest else [])]
    return _split([row for own in single.values() for row in own], depth + 1)


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


class _Names:
    """Names groups of modules, knowing all modules of the model."""

    def __init__(self, modules: Iterable[str], differences: Iterable[Difference]) -> None:
        self._alike: dict[str, set[str]] = defaultdict(set)
        for path in {path for module in modules for path in _paths(module)}:
            self._alike[mask_numbers(path)].add(path)
        self._holding = {path for row in differences for path in _paths(row.module)}

    def called(self, rows: Iterable[Difference], depth: int) -> str:
        """Return the name of the module of these rows, with `*` for numbers that stand for most modules of that name.

        Numbered modules of several classes are layers of the module that contains them, which is named instead. So is
        the module around several that have no common name; the name of the whole model is empty.
        """
        rows = list(rows)
        held = [holding for row in rows if len(row.parts) == depth for holding in (*row.before, *row.now)]
        if depth > 1 and len({holding.kind for holding in held if holding.kind}) > 1:
            depth -= rows[0].parts[depth - 1].isdecimal()
        names = list(dict.fromkeys(".".join(row.parts[:depth]) for row in rows))
        if len(names) == 1:
            return names[0]
        if len({mask_numbers(name) for name in names}) > 1:  # The remainder of several modules.
            return ""
        starred = common_name(names)
        alike = re.compile(r"\d+".join(map(re.escape, starred.split("*"))))
        others = {name for name in self._alike[mask_numbers(names[0])] if alike.fullmatch(name)} - set(names)
        if len(names) > len(others) and not self._holding & others:
            return starred if starred.strip("*.") else ""
        pieces = compact_names(names)
        return pieces[0][0] if len(pieces) == 1 else ".".join(_common(names))


def _paths(module: str) -> Iterator[str]:
    """Yield a module's path and those of the modules that contain it."""
    parts = module.split(".")
    yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def _common(names: Iterable[str]) -> list[str]:
    """Return the common beginning of these paths, as parts."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def _changed(rows: Iterable[Difference]) -> list[Difference]:
    return [row for row in rows if row.bytes]


def _net(rows: Iterable[Difference]) -> int:
    return sum(row.bytes for row in rows)
