"""Trials as replays: every block's bytes on one card, and the trace in its allocator, with a limit and without."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from autoaccum.devices.base import Outcome, Phase, Trial
from autoaccum.devices.simulated.allocator_settings import AllocatorSettings
from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.replay import Replay, least_capacity, replay, reserved_over
from autoaccum.devices.simulated.scratch import Estimate, estimate
from autoaccum.devices.simulated.trace import Scratch, Trace
from autoaccum.units import format_bytes


@dataclass(frozen=True)
class Demand:
    """A trace whose blocks all have a size.

    Attributes:
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
        """Return where the step is at an event; of an update that is repeated, where it was the first time."""
        last, end = self.trace.last_update, len(self.trace.events)
        if event >= end:
            event = last + (event - last) % (end - last)
        index = bisect_right(self.trace.phases, event, key=lambda phase: phase[0]) - 1
        return self.trace.phases[max(index, 0)][1]


def _most_at_once(events: tuple[int, ...], bands: dict[int, int]) -> int:
    """The most that the bands of blocks add up to that are alive at one time."""
    alive = most = 0
    for event in events:
        alive += bands.get(event, 0) - bands.get(~event, 0)
        most = max(most, alive)
    return most


_WORSE: Final[tuple[Outcome, ...]] = ("ok", "tight", "oom")
_SETTLED_BY = 8
"""After so many updates an allocator has found its way, or never does: few of those looked at took longer."""


class Replays:
    """Replays traces on one card under one torch."""

    def __init__(self, card: Card, settings: AllocatorSettings, torch_version: tuple[int, int]) -> None:
        self._card, self._torch_version = card, torch_version
        self._settings = settings
        self._estimates: dict[Scratch, Estimate] = {}
        self._known: dict[Trace, tuple[Demand, Replay]] = {}

    def weigh(self, trace: Trace) -> Demand:
        """Return what `trace` asks for, block by block."""
        return self._uncapped(trace)[0]

    def peak_bytes(self, trace: Trace) -> int:
        """The most the allocator holds where nothing limits it."""
        return self._uncapped(trace)[1].peak_reserved_bytes

    def least_bytes(self, trace: Trace, limit_bytes: int) -> int:
        """The smallest capacity at which `trace` goes through: within a limit, or where it takes more, beyond."""
        demand = self.weigh(trace)
        most = limit_bytes if self.trial(trace, limit_bytes).ran else self.peak_bytes(trace)
        return least_capacity(
            trace.events, demand.sizes, self._settings, trace.last_update, most=most, optional=demand.optional
        )

    def held_bytes(self, trace: Trace, limit_bytes: int) -> int:
        """The most the allocator holds within a limit, or until then where `trace` does not go through."""
        return self._within(limit_bytes, *self._uncapped(trace)).peak_reserved_bytes

    def reserved_bytes(self, trace: Trace) -> list[int]:
        """Return what the allocator holds after each event without a limit, of the last update when it is repeated."""
        return reserved_over(trace.events, self.weigh(trace).sizes, self._settings, trace.last_update)

    def expanding(self) -> Replays | None:
        """The same under an allocator whose segments grow; None where they do."""
        if self._settings.expandable_segments:
            return None
        settings = dataclasses.replace(self._settings, expandable_segments=True)
        return Replays(self._card, settings, self._torch_version)

    def trial(self, trace: Trace, limit_bytes: int) -> Trial:
        """The trial of `trace` within a limit; its peaks are those without one."""
        demand, roomy = self._uncapped(trace)
        held = self._within(limit_bytes, demand, roomy)
        about: dict[str, Any] = {
            "parts": trace.parts,
            "peak_allocated_bytes": roomy.peak_allocated_bytes,
            "peak_reserved_bytes": roomy.peak_reserved_bytes,
            "allocator_retries": held.retries,
        }
        if held.failed_at is not None:
            phase = demand.phase_at(held.failed_at)
            message = (
                f"micro-batch {max(trace.parts)} does not fit: {phase} asks for {format_bytes(held.asked_bytes)} more; "
                f"where nothing limits it, it takes {format_bytes(roomy.peak_reserved_bytes)}"
            )
            return Trial(outcome="oom", phase=phase, message=message, **about)
        if held.repeat_retries:
            return Trial(outcome="tight", message="every update would release the cache and ask again", **about)
        return Trial(outcome="ok", **about)

    def update(self, traces: Sequence[Trace], limit_bytes: int) -> Trial:
        """The trial of an update all of whose stretches are traced: the worst of their outcomes, the highest peaks."""
        trials = [self.trial(trace, limit_bytes) for trace in traces]
        return dataclasses.replace(
            max(trials, key=lambda trial: _WORSE.index(trial.outcome)),
            peak_allocated_bytes=max(trial.peak_allocated_bytes or 0 for trial in trials),
            peak_reserved_bytes=max(trial.peak_reserved_bytes or 0 for trial in trials),
        )

    def _uncapped(self, trace: Trace) -> tuple[Demand, Replay]:
        """The demand of `trace`, and its replay where nothing limits it; asked for more than once."""
        if trace not in self._known:
            demand = self._weigh(trace)
            self._known[trace] = demand, self._replay(demand, None)
        return self._known[trace]

    def _weigh(self, trace: Trace) -> Demand:
        sizes: list[int] = []
        bands: dict[int, int] = {}
        guessed: dict[str, None] = {}
        optional: dict[int, Scratch] = {}
        for block, size in enumerate(trace.sizes):
            if isinstance(size, int):
                sizes.append(size)
                continue
            found = self._estimates.get(size) or estimate(size, self._card, self._torch_version)
            self._estimates[size] = found
            sizes.append(found.bytes)
            bands[block] = found.band_bytes
            if found.optional:
                optional[block] = size
            if found.band_bytes and not found.measured:
                guessed[size.rule] = None
        return Demand(trace, tuple(sizes), _most_at_once(trace.events, bands), tuple(guessed), optional)

    def _within(self, limit_bytes: int, demand: Demand, roomy: Replay) -> Replay:
        return roomy if roomy.like_from_bytes <= limit_bytes else self._replay(demand, limit_bytes)

    def _replay(self, demand: Demand, capacity: int | None) -> Replay:
        """Return what nothing limits is settled by the third update; what has to give back is asked for longer."""
        return replay(
            demand.trace.events,
            demand.sizes,
            capacity=capacity,
            settings=self._settings,
            repeat_from=demand.trace.last_update,
            repeats=1 if capacity is None else _SETTLED_BY,
            optional=demand.optional,
        )
