"""The deepest modules that explain what grew, as one name where they are called alike."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, NamedTuple

from autoaccum.devices.explanation import Category, Holding
from autoaccum.workload.module_names import common_name, compact_names, mask_numbers

LASTING: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer_state", "averages")

_LITTLE = 0.1
"""What a module has of a growth is told with its parent's, up to this share of all that grew and shrank there."""

_MOST = 3
"""More modules than this are told as the one they are in."""

_NEARLY_ALL = 0.8


@dataclass(frozen=True)
class Difference:
    """What one module holds for one purpose, before and now; the model itself has no path, nor has what is nobody's."""

    category: Category
    module: str
    before: tuple[Holding, ...] = ()
    now: tuple[Holding, ...] = ()

    @property
    def kinds(self) -> set[str]:
        """The names of its class."""
        return {holding.kind for holding in (*self.before, *self.now) if holding.kind}

    @property
    def parts(self) -> list[str]:
        """The steps of its path."""
        return self.module.split(".") if self.module else []

    @property
    def before_bytes(self) -> int:
        """What it held."""
        return sum(holding.bytes for holding in self.before)

    @property
    def bytes(self) -> int:
        """By how much it grew."""
        return sum(holding.bytes for holding in self.now) - self.before_bytes


@dataclass(frozen=True)
class Share:
    """A part of a growth.

    Attributes:
        module: Whose it is, with all modules in it: as `ModuleShare.name`.
        differences: All of it, and what is as it was in these modules.
        is_rest: Whether it is what is left beside other shares.
    """

    module: str
    differences: tuple[Difference, ...]
    is_rest: bool = False

    @property
    def bytes(self) -> int:
        """By how much it grew."""
        return _net(self.differences)


def is_rest(holding: Holding) -> bool:
    """Whether it is what a lock has left of all modules that hold little."""
    return not (holding.module or holding.kind or holding.op or holding.dtype)


class _Group(NamedTuple):
    """Differences, and how many steps of their paths make the module that explains them."""

    rows: list[Difference]
    depth: int
    is_rest: bool = False


def attribute_to_modules(differences: Sequence[Difference], modules: Iterable[str]) -> list[Share]:
    """Split what grew for one purpose among the deepest modules that explain it.

    Modules that differ in numbers only are pushed into as one, unless one of them has nearly all. Where all in a module
    grew alike, or it and those in it both have a part, or too many in it do, it is theirs together. What is no module's
    is told apart.

    `differences` are by module, with those that are as they were; `modules` all there are, before and now.
    """
    known = _Names(modules, differences)
    inside = [difference for difference in differences if difference.module]
    outside = [difference for difference in differences if not difference.module and difference.bytes]
    groups = [*(_Group([difference], 0) for difference in outside), *_split(inside, 0)]
    return [
        Share(known.called(_changed(group.rows), group.depth), tuple(group.rows), group.is_rest) for group in groups
    ]


def _split(rows: list[Difference], depth: int) -> list[_Group]:
    """Groups that explain what grew in a module, or in several that differ in numbers only."""
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
    told = [group for child in large for group in _numbered(child, depth)]
    if sum(abs(_net(group.rows)) > little for group in told) > _MOST:
        told = [_Group(child, depth + 1) for child in large]
    taken = {id(row) for child in large for row in child}
    rest = [row for row in changed if id(row) not in taken]
    return [*told, *([_Group(rest, depth, True)] if rest else [])]


def _numbered(rows: list[Difference], depth: int) -> list[_Group]:
    """Into modules that differ in numbers only: into the one that has nearly all, or into all that changed as one."""
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
    """Whether nearly all of it grew by about the same factor; or is new, in a module or of what a model lasts with."""
    grown, before = _net(rows), sum(row.before_bytes for row in rows)
    if not before:
        return deep or rows[0].category in LASTING
    if not grown:
        return False
    # By what factor each grew, beside that of all.
    factors = [(row, row.bytes / row.before_bytes * before / grown) for row in rows if row.before_bytes]
    alike = [row for row, factor in factors if 0.5 <= factor <= 2]
    return _net(alike) / grown >= _NEARLY_ALL and sum(row.before_bytes for row in alike) >= _NEARLY_ALL * before


class _Names:
    """Names for modules, of all there are."""

    def __init__(self, modules: Iterable[str], differences: Iterable[Difference]) -> None:
        self._alike: dict[str, set[str]] = defaultdict(set)
        for path in {path for module in modules for path in _paths(module)}:
            self._alike[mask_numbers(path)].add(path)
        self._holding = {path for row in differences for path in _paths(row.module)}

    def called(self, rows: Iterable[Difference], depth: int) -> str:
        """The module of these rows; with `*` where they are all that are called alike and hold any of it, and most.

        Numbered modules of several classes are layers of the one they are in, which is named in place of them. So is
        the one around those that no single name is for; it is empty for the whole model.
        """
        rows = list(rows)
        if depth > 1 and len({kind for row in rows if len(row.parts) == depth for kind in row.kinds}) > 1:
            depth -= rows[0].parts[depth - 1].isdecimal()
        names = list(dict.fromkeys(".".join(row.parts[:depth]) for row in rows))
        if len(names) == 1:
            return names[0]
        if len({mask_numbers(name) for name in names}) > 1:  # What is left of several.
            return ""
        starred = common_name(names)
        alike = re.compile(r"\d+".join(map(re.escape, starred.split("*"))))
        others = {name for name in self._alike[mask_numbers(names[0])] if alike.fullmatch(name)} - set(names)
        if len(names) > len(others) and not self._holding & others:
            return starred if starred.strip("*.") else ""
        pieces = compact_names(names)
        return pieces[0][0] if len(pieces) == 1 else ".".join(_common(names))


def _paths(module: str) -> Iterator[str]:
    """A module and those around it."""
    parts = module.split(".")
    yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def _common(names: Iterable[str]) -> list[str]:
    """The names of all modules around these, from the model inwards."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def _changed(rows: Iterable[Difference]) -> list[Difference]:
    return [row for row in rows if row.bytes]


def _net(rows: Iterable[Difference]) -> int:
    return sum(row.bytes for row in rows)
