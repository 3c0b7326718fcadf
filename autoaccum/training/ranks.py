"""What several processes that train together agree on: the one place where anything is reduced over ranks."""

from __future__ import annotations

from typing import Protocol


class Ranks(Protocol):
    """The processes of one training; each method is called by all of them at the same point of the loop."""

    def least(self, number: int) -> int:
        """The smallest of their numbers: a ceiling."""


class OneRank:
    """One process alone."""

    def least(self, number: int) -> int:
        """Its own number."""
        return number
