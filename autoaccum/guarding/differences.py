"""What two measurements hold, module by module, side by side."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from autoaccum.devices.explanation import Category, Holding
from autoaccum.guarding.folding import natural

LASTING: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer_state", "averages")


@dataclass(frozen=True)
class Difference:
    """What one module holds for one purpose, before and now.

    Attributes:
        category: What for.
        module: Its path as it is now; before where it is gone. Empty for the model itself and what is no module's.
        before: What it held.
        now: What it holds.
    """

    category: Category
    module: str
    before: tuple[Holding, ...] = ()
    now: tuple[Holding, ...] = ()

    @property
    def kinds(self) -> set[str]:
        """The names of its class."""
        return {holding.kind for holding in (*self.before, *self.now) if holding.kind}

    @property
    def before_bytes(self) -> int:
        """What it held."""
        return sum(holding.bytes for holding in self.before)

    @property
    def bytes(self) -> int:
        """By how much it grew."""
        return sum(holding.bytes for holding in self.now) - self.before_bytes


def differences(before: Iterable[Holding], now: Iterable[Holding]) -> list[Difference]:
    """What is held on either side, by category and module: by the model itself, no module, and small ones apart.

    Args:
        before: What was held, under the names of now.
        now: What is held; small things are told as before.
    """
    sides: dict[tuple[Category, str, bool, bool], tuple[list[Holding], list[Holding]]] = {}
    for side, holdings in enumerate((before, now)):
        for holding in holdings:
            key = holding.category, holding.module, not holding.module and bool(holding.kind), is_rest(holding)
            sides.setdefault(key, ([], []))[side].append(holding)
    return [Difference(*key[:2], tuple(was), tuple(is_now)) for key, (was, is_now) in sides.items()]


def under_new_names(before: Sequence[Holding], now: Sequence[Holding]) -> list[Holding]:
    """What was held, by modules and classes as they are called now.

    A module that is called otherwise is the same if it holds the same; what is left of two such, if its parameters are,
    or if what it is in is the same.

    Args:
        before: What was held.
        now: What is held; small things are told as before.
    """
    names = _renamed(before, now)
    kinds = {holding.module: holding.kind for holding in now if holding.module}
    found = []
    for holding in before:
        module = names.get(holding.module, holding.module)
        found.append(dataclasses.replace(holding, module=module, kind=kinds.get(module, holding.kind)))
    return found


def is_rest(holding: Holding) -> bool:
    """Whether it is what a lock has left of all modules that hold little."""
    return not (holding.module or holding.kind or holding.op or holding.dtype)


def _renamed(before: Sequence[Holding], now: Sequence[Holding]) -> dict[str, str]:
    """From names as they were to names as they are, of modules that are called otherwise or are another's name now."""
    old, new = _by_module(before), _by_module(now)
    for name in [name for name in old.keys() & new.keys() if _is_same(old[name], new[name])]:
        del old[name], new[name]
    found: dict[str, str] = {}
    for signature in (_all_of, _lasting):
        for name, other in list(_matched(old, new, signature)):
            found[name] = other
            del old[name], new[other]
    for name in old.keys() & new.keys():
        found[name] = name
        del old[name], new[name]
    places = _places(found)
    taken = set(_by_module(now)) - new.keys()
    for name in old:
        other = _placed(name, places)
        # A name that is another module's now must not be mistaken for it.
        found[name] = f"{other} (before)" if other in taken else other
    return found


def _places(found: Mapping[str, str]) -> dict[str, str]:
    """What modules around those that were found are called now."""
    places = {}
    for name, other in found.items():
        was, is_now = name.split("."), other.split(".")
        if len(was) == len(is_now):
            places.update({".".join(was[:depth]): ".".join(is_now[:depth]) for depth in range(1, len(was) + 1)})
    return places


def _placed(name: str, places: Mapping[str, str]) -> str:
    """A module by the name of the innermost module around it that was found."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        place = places.get(".".join(parts[:depth]))
        if place is not None:
            return ".".join([place, *parts[depth:]])
    return name


def _matched(
    old: Mapping[str, Sequence[Holding]],
    new: Mapping[str, Sequence[Holding]],
    signature: Callable[[Iterable[Holding]], object],
) -> Iterator[tuple[str, str]]:
    waiting: dict[object, list[str]] = defaultdict(list)
    for name in sorted(new, key=natural, reverse=True):
        waiting[signature(new[name])].append(name)
    for name in sorted(old, key=natural):
        own = signature(old[name])
        if own and waiting.get(own):
            yield name, waiting[own].pop()


def _all_of(holdings: Iterable[Holding]) -> tuple[object, ...]:
    rows = Counter[tuple[str, str]]()
    for holding in holdings:
        rows[holding.category, holding.dtype] += holding.bytes
    return tuple(sorted(rows.items()))


def _lasting(holdings: Iterable[Holding]) -> tuple[object, ...]:
    return _all_of(holding for holding in holdings if holding.category in LASTING)


def _by_module(holdings: Iterable[Holding]) -> dict[str, list[Holding]]:
    found: dict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        if holding.module:
            found[holding.module].append(holding)
    return dict(found)


def _is_same(before: Sequence[Holding], now: Sequence[Holding]) -> bool:
    """Whether modules of one name are the same: of one class, or with the same parameters."""
    return before[0].kind == now[0].kind or (_lasting(before) == _lasting(now) != ())
