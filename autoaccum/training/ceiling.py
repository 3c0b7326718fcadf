"""How large micro-batches may be while the memory there is changes: down at once, up again after a calm stretch."""

from __future__ import annotations

from collections.abc import Mapping

_PATIENCE = 32
_MOST_PATIENCE = 32
"""By how much patience grows at most: raises that keep failing come every 1,024 updates in the end."""

_NEAR = 8
"""What is less than an eighth below the planned size is raised to it."""


class Ceiling:
    """The most samples run at once, from update to update.

    The Accumulator lowers it when memory runs out; after `patience` updates without that it is raised halfway to the
    planned one, or to it once that is near. A raise has succeeded when it was calm for as long again, which restores
    the patience; one that fails doubles it, and what fitted before is taken again.

    >>> ceiling = Ceiling(256, patience=2)
    >>> [ceiling.after(retries, size) for retries, size in [(2, 100), (0, 100), (0, 100), (1, 90), (0, 100), (0, 100)]]
    [None, None, 178, 100, None, None]
    >>> ceiling.largest, ceiling.patience
    (100, 4)

    Args:
        planned: Where it begins, and what it never exceeds; at least 1.
        patience: Calm updates before a raise, at least 1.

    Attributes:
        largest: The ceiling now, in samples.
        patience: Calm updates before the next raise.
    """

    def __init__(self, planned: int, *, patience: int = _PATIENCE) -> None:
        self.planned = self.largest = planned
        self.patience = self._usual = patience
        self._calm = 0
        self._fitted: int | None = None  # What held before a raise that has not succeeded yet.

    def after(self, retries: int, micro_batch: int) -> int | None:
        """Take an update in, and say what the ceiling becomes; None where it stays what it is.

        Args:
            retries: How often the update was repeated because memory ran out.
            micro_batch: The Accumulator's ceiling after it.
        """
        self.largest = min(max(micro_batch, 1), self.planned)
        if retries:
            return self._fall()
        self._calm += 1
        if self._fitted is not None and self._calm >= self.patience:
            self._fitted, self.patience = None, self._usual
        if self._fitted is not None or self.largest == self.planned or self._calm < self.patience:
            return None
        return self._rise()

    def state(self) -> dict[str, int | None]:
        """What `restore` goes on from, as plain values."""
        return {"largest": self.largest, "calm": self._calm, "patience": self.patience, "fitted": self._fitted}

    def restore(self, state: Mapping[str, int | None]) -> None:
        """Go on from a `state`; under a smaller planned size than it was taken with, that size bounds it."""
        self.largest = min(max(state["largest"] or 1, 1), self.planned)
        self._calm = state["calm"] or 0
        self.patience = min(max(state["patience"] or 1, self._usual), self._usual * _MOST_PATIENCE)
        fitted = state["fitted"]
        self._fitted = None if fitted is None else min(fitted, self.planned)

    def _fall(self) -> int | None:
        fitted, self._fitted, self._calm = self._fitted, None, 0
        if fitted is None:
            return None
        self.patience = min(2 * self.patience, self._usual * _MOST_PATIENCE)
        if fitted <= self.largest:
            return None
        self.largest = fitted
        return fitted

    def _rise(self) -> int:
        self._fitted, self._calm = self.largest, 0
        halfway = (self.largest + self.planned + 1) // 2
        self.largest = self.planned if (self.planned - halfway) * _NEAR < self.planned else halfway
        return self.largest
