"""What two measurements hold, module by module, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from autoaccum.devices.explanation import Category, Holding

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


def is_rest(holding: Holding) -> bool:
    """Whether it is what a lock has left of all modules that hold little."""
    return not (holding.module or holding.kind or holding.op or holding.dtype)
