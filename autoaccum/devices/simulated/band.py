"""How far off a prediction may be, and of what that is made."""

from __future__ import annotations

from dataclasses import dataclass

from autoaccum.devices.simulated.context import Outside
from autoaccum.devices.simulated.demand import Demand
from autoaccum.units import MIB, format_bytes


@dataclass(frozen=True)
class Band:
    """The band of one schedule on one card.

    It is a sum, since what it is made of is not known to be independent: what the process holds outside of the
    allocator, and the kernels' own memory that is alive at one time, as far as nobody has measured either.

    Args:
        outside: What the process holds outside of the allocator.
        demand: What the schedule asks of the allocator.
    """

    outside: Outside
    demand: Demand

    @property
    def bytes(self) -> int:
        """In all, either way."""
        return self.outside.band_bytes + self.demand.band_bytes

    def note(self) -> str:
        """That nothing ran, and how far off it may be, as a sentence for the plan."""
        return (
            f"nothing ran on a card: memory is predicted, give or take {format_bytes(self.bytes)}, and measured by the"
            " same command without --gpu, on the card"
        )

    def made_of(self) -> str:
        """What the band covers and what it does not, as a sentence for the plan."""
        parts = [f"the CUDA context ({format_bytes(self.outside.bytes)} assumed)"]
        if self.demand.band_bytes:
            rules = ", ".join(rule.replace("_", " ") for rule in self.demand.guessed) or "libraries"
            parts.append(f"workspaces that nobody measured ({rules}: {format_bytes(self.demand.band_bytes)})")
        return (
            f"the band of {format_bytes(self.bytes)} is for {' and '.join(parts)}, not for other programs on the card"
            " or batches larger than batch(size)"
        )

    def warning(self, limit_bytes: int, least_bytes: int) -> str | None:
        """A sentence where the budget leaves something above the least that is needed, and less than the band."""
        room_bytes = limit_bytes - least_bytes
        if not 0 <= room_bytes < self.bytes:
            return None
        reserve = -(-self.bytes // (100 * MIB)) * 100
        keep = f", or keep more (--reserve {reserve}MiB)" if 2 * reserve * MIB < limit_bytes else ""
        return (
            f"the budget leaves {format_bytes(room_bytes)} above the least that is needed, and the prediction may be "
            f"off by {format_bytes(self.bytes)}: measure on the card (--device cuda){keep}"
        )
