"""How far a picture of losses reaches up: a few that are huge must not press the others into a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FAR = 30.0
_REACH = 2.5
"""Above the best, in distances of the median from it."""


@dataclass(frozen=True)
class Losses:
    """From where to where losses are drawn.

    Attributes:
        low: The least.
        high: What lies above is drawn at the edge.
        known: Whether there is any.
    """

    low: float
    high: float
    known: bool = True

    @property
    def logarithmic(self) -> bool:
        """Whether they are too far apart for another scale."""
        return self.low > 0 and self.high / self.low > _FAR

    def place(self, loss: float) -> float:
        """Where a loss is drawn."""
        return min(loss, self.high)


def choose_losses(losses: Sequence[float]) -> Losses:
    """A scale on which a valley is seen: up to a few times as high above the best as the median is.

    >>> choose_losses([1.0, 1.5, 2.0, 1e9])
    Losses(low=1.0, high=2.0, known=True)
    >>> choose_losses([0.5]), choose_losses([])
    (Losses(low=0.0, high=1.0, known=True), Losses(low=0.0, high=1.0, known=False))
    """
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    if not finite:
        return Losses(0.0, 1.0, known=False)
    low = finite[0]
    reach = low + _REACH * (finite[(len(finite) - 1) // 2] - low)
    high = max((loss for loss in finite if loss <= reach), default=low)
    high = high if high > low else finite[-1]
    if high <= low:
        pad = abs(low) or 1.0
        return Losses(low - pad, low + pad)
    return Losses(low, high)
