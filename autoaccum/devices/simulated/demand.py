"""What a trace asks of one card's allocator: every block's bytes, and how far off they may be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoaccum.devices.base import Phase
from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.scratch import Estimate, estimate
from autoaccum.devices.simulated.trace import Scratch, Trace


@dataclass(frozen=True)
class Demand:
    """A trace whose blocks all have a size.

    Attributes:
        trace: What was asked for, in order.
        sizes: By block, in bytes.
        band_bytes: How far off the blocks may be that are alive at one time: the most at any.
        guessed: Rules that tell a size nobody has measured, of blocks that count in the band.
        optional: Blocks that are done without where no memory is left, and what each is for.
    """

    trace: Trace
    sizes: tuple[int, ...]
    band_bytes: int
    guessed: tuple[str, ...]
    optional: Mapping[int, Scratch] = field(default_factory=dict)

    def phase_at(self, event: int) -> Phase:
        """Where the step is at an event; of an update that is repeated, where it was the first time."""
        last, end = self.trace.last_update, len(self.trace.events)
        if event >= end:
            event = last + (event - last) % (end - last)
        index = bisect_right(self.trace.phases, event, key=lambda phase: phase[0]) - 1
        return self.trace.phases[max(index, 0)][1]


class Weigher:
    """Tells the demand of traces on one card under one torch.

    Args:
        card: The card.
        torch_version: Major and minor, such as (2, 15).
    """

    def __init__(self, card: Card, torch_version: tuple[int, int]) -> None:
        self._card, self._torch_version = card, torch_version
        self._known: dict[Scratch, Estimate] = {}

    def weigh(self, trace: Trace) -> Demand:
        """The demand of `trace`."""
        sizes: list[int] = []
        bands: dict[int, int] = {}
        guessed: dict[str, None] = {}
        optional: dict[int, Scratch] = {}
        for block, size in enumerate(trace.sizes):
            if isinstance(size, int):
                sizes.append(size)
                continue
            found = self._estimate(size)
            sizes.append(found.bytes)
            bands[block] = found.band_bytes
            if found.optional:
                optional[block] = size
            if found.band_bytes and not found.measured:
                guessed[size.rule] = None
        return Demand(trace, tuple(sizes), _most_at_once(trace.events, bands), tuple(guessed), optional)

    def _estimate(self, scratch: Scratch) -> Estimate:
        if scratch not in self._known:
            self._known[scratch] = estimate(scratch, self._card, self._torch_version)
        return self._known[scratch]


def _most_at_once(events: tuple[int, ...], bands: dict[int, int]) -> int:
    """The most that the bands of blocks add up to that are alive at one time."""
    alive = most = 0
    for event in events:
        alive += bands.get(event, 0) - bands.get(~event, 0)
        most = max(most, alive)
    return most
