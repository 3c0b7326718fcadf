"""What modules are called now: those that were renamed, moved, wrapped or renumbered."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from autoaccum.devices.explanation import Holding
from autoaccum.guarding.locks.folding import natural

_ALIKE = 0.5
"""What two modules have to have in common of what is in them, to be the same under another name."""


class _Traits(NamedTuple):
    """What tells a module, beside its name: its class, and the bytes of its own parameters."""

    kind: str
    parameter_bytes: int


def under_new_names(
    before: Sequence[Holding], now: Sequence[Holding], complete: Sequence[Holding] = ()
) -> list[Holding]:
    """What was held, by modules and classes as they are called now.

    Modules are compared from the model inwards: one that is there under its name is the same; of the others, those at
    the same place that have at least half in common. A module that moved elsewhere is the same if its class is and its
    parameters take as much. One of which none of that is sure keeps its name: it is gone, and another is new.

    Args:
        before: What was held.
        now: What is held; small things are told as before.
        complete: The same with all small things, for modules that moved to where nothing else is as large.
    """
    old, new = _Tree(before), _Tree(complete or now)
    names = _Pairs(old, _Tree(now), new).found()
    found = []
    for holding in before:
        if holding.module or holding.kind:
            module = names[holding.module]
            kind = new.traits[module].kind if module in new.traits else holding.kind
            found.append(dataclasses.replace(holding, module=module, kind=kind))
        else:
            found.append(holding)
    return found


class _Tree:
    """Modules that hold something, the model itself among them as an empty path."""

    def __init__(self, holdings: Iterable[Holding]) -> None:
        self.traits: dict[str, _Traits] = {}
        for holding in holdings:
            if holding.module or holding.kind:
                known = self.traits.get(holding.module, _Traits("", 0))
                more = holding.bytes if holding.category == "parameters" else 0
                self.traits[holding.module] = _Traits(holding.kind, known.parameter_bytes + more)
        self._within: dict[str, dict[str, _Traits]] = defaultdict(dict)
        self._children: dict[str, dict[str, None]] = defaultdict(dict)
        for path in sorted(self.traits, key=natural):
            parts = path.split(".") if path else []
            for depth in range(len(parts) + 1):
                around = ".".join(parts[:depth])
                self._within[around][".".join(parts[depth:])] = self.traits[path]
                if depth < len(parts):
                    self._children[around][parts[depth]] = None

    def within(self, path: str) -> Mapping[str, _Traits]:
        """What is in a module, by path from there; itself among it."""
        return self._within.get(path, {})

    def children(self, path: str) -> list[str]:
        """Names of the modules right in a module, in order."""
        return list(self._children.get(path, ()))

    def outer(self) -> list[str]:
        """Paths of all that may be what a wrapper is around: the model, and what is in it at most two deep."""
        return [path for path in self._within if path.count(".") < 2]


class _Pairs:
    """Which module of one tree is which of another."""

    def __init__(self, old: _Tree, new: _Tree, complete: _Tree) -> None:
        self._old, self._new, self._complete = old, new, complete
        self._pairs: dict[str, str] = {}

    def found(self) -> dict[str, str]:
        """The name of each old module now; of one that is gone, where it would be."""
        self._pair(*self._roots())
        self._pair_moved()
        there = self._complete.traits
        taken = set(self._pairs.values())
        names = {}
        for name, traits in self._old.traits.items():
            place = self._pairs.get(name)
            if place is None:
                place = self._placed(name)
                # A name that is another module's now must not be mistaken for it.
                if place in taken or (place in there and there[place].kind != traits.kind):
                    place = f"{place} (before)"
                taken.add(place)
            names[name] = place
        return names

    def _roots(self) -> tuple[str, str]:
        """The model on both sides, or what a wrapper is around, if more of the names are alike then."""
        pairs = [("", ""), *(("", path) for path in self._new.outer()), *((path, "") for path in self._old.outer())]
        return max(pairs, key=lambda pair: _alike_names(self._old.within(pair[0]), self._new.within(pair[1])))

    def _pair(self, old: str, new: str) -> None:
        """A module and what is in it."""
        self._pairs[old] = new
        olds, news = self._old.children(old), self._new.children(new)
        same = self._renumbered(old, new) or {
            name: name for name in olds if name in news and self._is_same(_join(old, name), _join(new, name))
        }
        taken = set(same.values())
        left = [name for name in olds if name not in same], [name for name in news if name not in taken]
        same |= dict(self._alike(old, new, *left, surely_here=bool(old and same)))
        taken = set(same.values())
        same |= {name: name for name in olds if name not in same and name in news and name not in taken}
        for name, other in same.items():
            self._pair(_join(old, name), _join(new, other))

    def _is_same(self, old: str, new: str) -> bool:
        """Whether modules of one name are the same: of one class, with the same parameters, or with the same within."""
        was, is_now = self._old.within(old), self._new.within(new)
        own = was.get(""), is_now.get("")
        if own[0] and own[1]:
            return own[0].kind == own[1].kind or own[0].parameter_bytes == own[1].parameter_bytes > 0
        return _alike_names(was, is_now) > 0

    def _renumbered(self, old: str, new: str) -> dict[str, str]:
        """Layers in a row that moved on, since others were inserted or are gone; empty where that tells no more."""
        olds, news = self._old.children(old), self._new.children(new)
        if len(olds) == len(news) or not all(name.isdecimal() for name in (*olds, *news)):
            return {}
        was, is_now = (
            [tuple(sorted(tree.within(_join(path, name)).items())) for name in names]
            for tree, path, names in ((self._old, old, olds), (self._new, new, news))
        )
        unmoved = sum(name in news and was[at] == is_now[news.index(name)] for at, name in enumerate(olds))
        found: dict[str, str] = {}
        count = 0
        for tag, start, end, other, last in SequenceMatcher(None, was, is_now, autojunk=False).get_opcodes():
            if tag == "equal" or (tag == "replace" and end - start == last - other):
                found.update(zip(olds[start:end], news[other:last], strict=True))
                count += (end - start) * (tag == "equal")
        return found if count > unmoved else {}

    def _alike(
        self, old: str, new: str, olds: Sequence[str], news: Sequence[str], *, surely_here: bool
    ) -> Iterator[tuple[str, str]]:
        """Modules at one place that are called otherwise, those first that have most in common.

        Of those without anything of their own, the class is enough where others around them are the same.
        """
        shares = {
            (name, other): _in_common(was, is_now)
            for name in olds
            for other in news
            for was, is_now in [(self._old.within(_join(old, name)), self._new.within(_join(new, other)))]
            if surely_here or any(traits.parameter_bytes for traits in was.values())
        }
        seen: set[str] = set()
        gone: set[str] = set()
        for name, other in sorted(shares, key=lambda pair: -shares[pair]):
            if shares[name, other] >= _ALIKE and name not in gone and other not in seen:
                gone.add(name)
                seen.add(other)
                yield name, other

    def _pair_moved(self) -> None:
        """Modules that are somewhere else, by class and parameters; with them, those they are in."""
        waiting: dict[_Traits, list[str]] = defaultdict(list)
        for name in sorted(set(self._complete.traits) - set(self._pairs.values()), key=natural, reverse=True):
            waiting[self._complete.traits[name]].append(name)
        for name in sorted(set(self._old.traits) - set(self._pairs), key=natural):
            traits = self._old.traits[name]
            if traits.parameter_bytes and waiting[traits]:
                self._pairs[name] = waiting[traits].pop()
        for name, other in list(self._pairs.items()):
            for around, place in _around(name, other):
                if around not in self._pairs and place not in self._pairs.values():
                    self._pairs[around] = place

    def _placed(self, name: str) -> str:
        """A module by the name of the innermost module around it that was found."""
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            place = self._pairs.get(".".join(parts[:depth]))
            if place is not None:
                return _join(place, ".".join(parts[depth:]))
        return _join(self._pairs.get("", ""), name)


def _alike_names(old: Mapping[str, _Traits], new: Mapping[str, _Traits]) -> int:
    """How many have one path and one class."""
    return sum(path in new and new[path].kind == traits.kind for path, traits in old.items())


def _in_common(old: Mapping[str, _Traits], new: Mapping[str, _Traits]) -> float:
    """What share of two modules is alike: by name and class, or by class and parameters; of single ones, the latter."""
    traits = (Counter(old.values()) & Counter(new.values())).total()
    names = _alike_names(old, new) if len(old) > 1 and len(new) > 1 else 0
    return max(traits, names) / max(len(old), len(new))


def _around(name: str, other: str) -> Iterator[tuple[str, str]]:
    """Modules around two that are the same, as far as what is in them is called alike."""
    was, is_now = name.split("."), other.split(".")
    while len(was) > 1 and len(is_now) > 1 and was.pop() == is_now.pop():
        yield ".".join(was), ".".join(is_now)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
