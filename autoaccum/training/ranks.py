"""What several processes that train together agree on: the one place where anything is reduced over ranks."""

from __future__ import annotations

from typing import Protocol


class Ranks(Protocol):
    """The processes of one training; each method is called by all of them at the same point of the loop."""

    @property
    def rank(self) -> int:
        """This process, counted from 0; rank 0 writes what there is one of: checkpoints, logs."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def any(self, flag: bool) -> bool:
        """Whether one of them says so: out of memory, asked to stop."""

    def least(self, number: int) -> int:
        """The smallest of their numbers: a ceiling."""

    def sums(self, numbers: list[float]) -> list[float]:
        """Their numbers, added up entry by entry: weights and losses."""


class OneRank:
    """One process alone."""

    rank = 0
    world_size = 1

    def any(self, flag: bool) -> bool:
        """Its own word."""
        return flag

    def least(self, number: int) -> int:
        """Its own number."""
        return number

    def sums(self, numbers: list[float]) -> list[float]:
        """Its own numbers."""
        return numbers
