"""Values that cover a range evenly, however many of them come."""

from __future__ import annotations

import math
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

_STEPS = ((math.sqrt(5) - 1) / 2, math.sqrt(2) - 1, math.sqrt(3) - 1)
"""Fractional parts of irrational numbers, one for each parameter: multiples of them fill the unit cube evenly
(Weyl's equidistribution; the golden ratio's leave the smallest gaps on a line)."""


def spread(distribution: BaseDistribution, number: int, parameter: int, start: float) -> Any:
    """One of a sequence of values that covers `distribution` evenly.

    Args:
        distribution: What is covered; numbers by their logarithm where it says so.
        number: Of the value in the sequence.
        parameter: Of the distribution among those that are covered jointly.
        start: Where the sequence begins, from 0 to 1.

    >>> [round(spread(FloatDistribution(1e-4, 1.0, log=True), number, 0, 0.5), 5) for number in range(4)]
    [0.01, 0.0003, 0.08796, 0.00261]
    """
    share = (start + number * _STEPS[parameter % len(_STEPS)]) % 1.0
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(share * len(distribution.choices))]
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    if isinstance(distribution, IntDistribution):
        low, high = distribution.low - 0.5, distribution.high + 0.5
        value = low * (high / low) ** share if distribution.log else low + share * (high - low)
        return min(max(round(value), distribution.low), distribution.high)
    low, high = distribution.low, distribution.high
    value = low * (high / low) ** share if distribution.log else low + share * (high - low)
    return min(max(value, low), high)
