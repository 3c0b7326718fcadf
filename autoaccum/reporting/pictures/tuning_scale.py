"""How far a picture of losses reaches up: a few that are huge must not press the others into a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FAR = 30.0
_REACH = 2.5
"""Above the best, in distances of the third quartile from it."""


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


def choose_losses(complete: Sequence[float], others: Sequence[float]) -> Losses:
    """A scale on which complete trials can be told apart.

    Args:
        complete: Losses of complete trials.
        others: Of those that ended early.

    >>> choose_losses([1.0, 1.5, 2.0, 1e9], [3.0])
    Losses(low=1.0, high=3.0, known=True)
    >>> choose_losses([0.5], []), choose_losses([], [])
    (Losses(low=0.0, high=1.0, known=True), Losses(low=0.0, high=1.0, known=False))
    """
    finite = sorted(loss for loss in (*complete, *others) if math.isfinite(loss))
    if not finite:
        return Losses(0.0, 1.0, known=False)
    told = sorted(loss for loss in complete if math.isfinite(loss)) or finite
    low, high = finite[0], finite[-1]
    if len(told) > 2:
        reach = told[0] + _REACH * (told[3 * (len(told) - 1) // 4] - told[0])
        inside = [loss for loss in finite if loss <= reach]
        high = inside[-1] if len(inside) > 1 else high
    if high <= low:
        pad = abs(low) or 1.0
        return Losses(low - pad, low + pad)
    return Losses(low, high)
