"""What a labelled trace holds at every event, by what it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import get_args

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import CATEGORIES, Category
from autoaccum.devices.simulated.demand import Demand
from autoaccum.devices.simulated.labels import LabelledTrace
from autoaccum.devices.simulated.purposes import Purpose, purposes


class Ledger:
    """Adds up the blocks of a trace that are alive.

    Args:
        labelled: The trace, and what is known of its blocks.
        demand: What they ask for on one card.

    Attributes:
        labelled, demand: As given.
        purposes: By block, what it is for.
    """

    def __init__(self, labelled: LabelledTrace, demand: Demand) -> None:
        self.labelled, self.demand = labelled, demand
        self.purposes: Sequence[Purpose] = purposes(labelled)

    @cached_property
    def totals(self) -> Mapping[Category, Sequence[int]]:
        """By category, in order, the bytes that are held after each event; `unused` is no block's."""
        steps = {category: [0] * (len(self.labelled.trace.events) + 1) for category in CATEGORIES}
        del steps["unused"]
        for purpose, size in zip(self.purposes, self.demand.sizes, strict=True):
            own = steps[purpose.category]
            own[purpose.born] += size
            own[purpose.died] -= size
        return {category: list(accumulate(step[:-1])) for category, step in steps.items()}

    @cached_property
    def held_bytes(self) -> Sequence[int]:
        """What is held after each event."""
        return [sum(held) for held in zip(*self.totals.values(), strict=True)]

    @cached_property
    def highest(self) -> Mapping[Phase, int]:
        """By phase, in order, the index of the event that asks for memory when most is held in it: the last such."""
        trace, held, sizes = self.labelled.trace, self.held_bytes, self.demand.sizes
        ends = [*(index for index, _ in trace.phases[1:]), len(trace.events)]
        found: dict[Phase, int] = {}
        for (start, phase), end in zip(trace.phases, ends, strict=True):
            for at in range(start, end):
                event = trace.events[at]
                asks = event >= 0 and (sizes[event] or not held[at])
                if asks and held[at] >= held[found.get(phase, at)]:
                    found[phase] = at
        return {phase: found[phase] for phase in get_args(Phase) if phase in found}

    @cached_property
    def peak_at(self) -> int:
        """The index of the event that asks for memory when most is held: the last such."""
        return max(self.highest.values(), key=lambda at: (self.held_bytes[at], at))

    def alive(self, event: int) -> list[tuple[int, Category]]:
        """The blocks that are there after an event, and what they are for."""
        return [
            (block, purpose.category)
            for block, purpose in enumerate(self.purposes)
            if purpose.born <= event < purpose.died
        ]
