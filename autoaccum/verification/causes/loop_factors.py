"""What is wrong with the factors by which a loop multiplied the gradients of a window's parts: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LoopMistake = Literal[
    "zeroed", "left out", "undivided", "divided twice", "mean of means", "constant", "scaled", "uneven"
]

_CLOSE = 1e-6


@dataclass(frozen=True)
class SplitFactors:
    """The factors by which a loop multiplied the gradients of a window's parts, and the right ones, their shares."""

    factors: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.factors)

    @property
    def ratios(self) -> list[float]:
        """Factor over share of each part that should count."""
        return [factor / share for factor, share in zip(self.factors, self.shares, strict=True) if share > 0]

    @property
    def common(self) -> float | None:
        """The factor of all parts; None where they differ."""
        return _constant(self.factors)

    @property
    def ratio(self) -> float | None:
        """The ratio of factor to share of all parts; None where it differs."""
        return _constant(self.ratios)


def find_mistake(split: SplitFactors, other: SplitFactors | None = None) -> LoopMistake | None:
    """Name what is wrong with the factors; None where they are the shares.

    `other`, the same window in another number of parts, shows whether a divisor is fixed or counts the parts.

    >>> find_mistake(SplitFactors((1.0, 1.0), (0.5, 0.5)))
    'undivided'
    >>> find_mistake(SplitFactors((0.25, 0.25), (0.5, 0.5)), SplitFactors((1 / 9,) * 3, (1 / 3,) * 3))
    'divided twice'
    >>> find_mistake(SplitFactors((0.25, 0.25), (0.5, 0.5)), SplitFactors((0.25,) * 3, (1 / 3,) * 3))
    'constant'
    """
    if is_close(split.ratio, 1.0):
        return None
    pairs = enumerate(zip(split.factors, split.shares, strict=True))
    missing = [index for index, (factor, share) in pairs if abs(factor) <= _CLOSE * share]
    if missing:
        return "zeroed" if missing == list(range(split.parts - 1)) and split.parts > 1 else "left out"
    splits = [split] if other is None else [split, other]
    if all(is_close(one.common, 1.0) or is_close(one.ratio, float(one.parts)) for one in splits):
        return "undivided"
    if all(is_close(one.common, 1 / one.parts) for one in splits):
        return "mean of means"
    if all(is_close(one.common, 1 / one.parts**2) or is_close(one.ratio, 1 / one.parts) for one in splits):
        return "divided twice"
    if other is not None and _is_fixed(split, other):
        return "constant"
    return "uneven" if split.ratio is None else "scaled"


def is_close(one: float | None, two: float) -> bool:
    """Return whether two numbers are equal to rounding."""
    return one is not None and abs(one - two) <= _CLOSE * max(abs(one), abs(two))


def _is_fixed(split: SplitFactors, other: SplitFactors) -> bool:
    """Return whether parts are divided by the same number, whatever the number of parts."""
    same_factor = split.common is not None and is_close(other.common, split.common)
    return same_factor or (split.ratio is not None and split.ratio < 1 and is_close(other.ratio, split.ratio))


def _constant(values: Sequence[float]) -> float | None:
    return values[0] if values and all(is_close(value, values[0]) for value in values) else None
