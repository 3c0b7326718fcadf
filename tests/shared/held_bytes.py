"""What the blocks of a trace hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def most_held(events: Sequence[int], sizes: Sequence[Any]) -> int:
    """The most at once, of those that take bytes."""
    alive = most = 0
    for event in events:
        size = sizes[event if event >= 0 else ~event]
        alive += (size if event >= 0 else -size) if isinstance(size, int) else 0
        most = max(most, alive)
    return most
