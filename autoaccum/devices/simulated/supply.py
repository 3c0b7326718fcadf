"""The memory that a simulated card has for trials."""

from __future__ import annotations

from dataclasses import dataclass

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.context import Outside
from autoaccum.units import format_bytes


@dataclass(frozen=True)
class CardSupply:
    """A card's memory as `choose_budget` takes it: free is what is left beside the context.

    Attributes:
        card: The card.
        outside: What the process holds there outside of the allocator.
        allowed_bytes: What the allocator is limited to by its settings; None without a limit.
    """

    card: Card
    outside: Outside
    allowed_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """All there is."""
        return self.card.total_bytes

    @property
    def free_bytes(self) -> int:
        """What is left beside the context, and allowed."""
        free_bytes = max(0, self.card.total_bytes - self.outside.bytes)
        return free_bytes if self.allowed_bytes is None else min(free_bytes, self.allowed_bytes)

    @property
    def bound(self) -> str:
        """As the subject of `... has free`."""
        allowed = "" if self.allowed_bytes is None else ", and no more than per_process_memory_fraction allows"
        return f"{self.card.name} (simulated, {format_bytes(self.outside.bytes)} of it for its context{allowed})"
