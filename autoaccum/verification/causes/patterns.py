"""What a loop of the user's own does to its parts, told from what each part counts for: pure numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Fault = Literal["zeroed", "left out", "undivided", "divided twice", "mean of means", "constant", "scaled", "uneven"]

_CLOSE = 1e-6

_LEAST_SCALE = 2.0**8
"""A smaller factor may be a count of parts or samples."""


@dataclass(frozen=True)
class Cut:
    """One window, cut and accumulated by the loop.

    Attributes:
        factors: What each part's gradient was multiplied by.
        shares: What would have been right.
    """

    factors: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def parts(self) -> int:
        """How many parts it has."""
        return len(self.factors)

    @property
    def common(self) -> float | None:
        """The factor, where all parts have the same."""
        return _constant(self.factors)

    @property
    def ratio(self) -> float | None:
        """How many times too large every part's factor is, where it is the same for all."""
        pairs = zip(self.factors, self.shares, strict=True)
        return _constant([factor / share for factor, share in pairs if share > 0])

    @property
    def shrinks(self) -> bool:
        """Whether every part counts for more of its share than the one before, as where each clips what there is."""
        pairs = [(factor, share) for factor, share in zip(self.factors, self.shares, strict=True) if share > 0]
        ratios = [factor / share for factor, share in pairs]
        grows = all(one <= two * (1 + _CLOSE) for one, two in zip(ratios, ratios[1:], strict=False))
        return bool(ratios) and 0 < ratios[0] < ratios[-1] <= 1 and grows

    @property
    def missing(self) -> list[int]:
        """Indices of parts that should count, and do not."""
        pairs = enumerate(zip(self.factors, self.shares, strict=True))
        return [index for index, (factor, share) in pairs if abs(factor) <= _CLOSE * share]


def name_fault(cut: Cut, other: Cut | None = None) -> Fault | None:
    """What is wrong with the factors; None where they are the shares.

    Args:
        cut: The window as it was accumulated.
        other: The same window in another number of parts, which tells a divisor that is fixed from one that counts.

    >>> name_fault(Cut((1.0, 1.0), (0.5, 0.5)))
    'undivided'
    >>> name_fault(Cut((0.25, 0.25), (0.5, 0.5)), Cut((1 / 9,) * 3, (1 / 3,) * 3))
    'divided twice'
    >>> name_fault(Cut((0.25, 0.25), (0.5, 0.5)), Cut((0.25,) * 3, (1 / 3,) * 3))
    'constant'
    """
    if is_close(cut.ratio, 1.0):
        return None
    if cut.missing:
        return "zeroed" if cut.missing == list(range(cut.parts - 1)) and cut.parts > 1 else "left out"
    cuts = [cut] if other is None else [cut, other]
    if all(is_close(one.common, 1.0) or is_close(one.ratio, float(one.parts)) for one in cuts):
        return "undivided"
    if all(is_close(one.common, 1 / one.parts) for one in cuts):
        return "mean of means"
    if all(is_close(one.common, 1 / one.parts**2) or is_close(one.ratio, 1 / one.parts) for one in cuts):
        return "divided twice"
    if other is not None and _is_fixed(cut, other):
        return "constant"
    return "uneven" if cut.ratio is None else "scaled"


def find_scale(cut: Cut, other: Cut | None = None) -> float | None:
    """The loss scale that all parts are left multiplied by: a large power of two, in however many parts.

    >>> find_scale(Cut((16384.0, 16384.0), (0.25, 0.25)), Cut((16384.0, 32768.0), (0.25, 0.5)))
    65536.0
    >>> find_scale(Cut((4.0, 4.0), (0.5, 0.5))) is None
    True
    """
    pairs = [(cut.ratio, None if other is None else other.ratio), (cut.common, None if other is None else other.common)]
    for scale, again in pairs:
        if scale is not None and (other is None or is_close(again, scale)):
            nearest = 2.0 ** round(math.log2(scale)) if scale >= _LEAST_SCALE else 0.0
            if is_close(nearest, scale) and nearest:
                return nearest
    return None


def is_close(one: float | None, two: float) -> bool:
    """Whether `one` is `two` but for rounding."""
    return one is not None and abs(one - two) <= _CLOSE * max(abs(one), abs(two))


def _is_fixed(cut: Cut, other: Cut) -> bool:
    """Whether parts are divided by the same number, however many there are."""
    same_factor = cut.common is not None and is_close(other.common, cut.common)
    return same_factor or (cut.ratio is not None and cut.ratio < 1 and is_close(other.ratio, cut.ratio))


def _constant(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return values[0] if all(is_close(value, values[0]) for value in values) else None
