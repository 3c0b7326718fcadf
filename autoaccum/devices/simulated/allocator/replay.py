"""Trials as replays: a trace in the allocator of one card, with a limit and without, and in how little it fits."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from autoaccum.devices.base import Outcome, Phase, Trial
from autoaccum.devices.simulated.allocator.blocks import Block
from autoaccum.devices.simulated.allocator.caching_allocator import (
    LARGE_GRAIN_BYTES,
    SMALL_BYTES,
    CachingAllocator,
    CudaOutOfMemory,
)
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings
from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.scratch import Estimate, estimate
from autoaccum.devices.simulated.trace import Trace, Workspace
from autoaccum.units import format_bytes

_NOTHING: Mapping[int, Hashable] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The outcome of a replay.

    Attributes:
        repeat_retries: How often updates that are like the one before still had to give cached memory back first when
            the replay ended, so that training is slow for good. PyTorch counts only some of these among its retries.
        failed_at: The index of the event that found no memory; one of a repeated update counts on. None: all did.
        asked_bytes: What that event asked for; 0 when none failed.
        valid_from_bytes: The same comes of any capacity from here
        valid_below_bytes: to below here (None: of any above): it grants what was granted, and refuses what was refused.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int = 0
    repeat_retries: int = 0
    failed_at: int | None = None
    asked_bytes: int = 0
    valid_from_bytes: int
    valid_below_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Return whether every event found memory."""
        return self.failed_at is None


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    capacity: int | None = None,
    settings: AllocatorSettings | None = None,
    repeat_from: int | None = None,
    repeats: int = 1,
    optional: Mapping[int, Hashable] = _NOTHING,
) -> ReplayResult:
    """Replay a trace.

    Args:
        events: In order: the number of a block that is allocated, or `~number` of one that is freed.
        sizes: Of each block, in bytes; those of 0 are never allocated, as PyTorch does.
        capacity: Bytes of the card there are for segments; None: any number.
        settings: Of the allocator.
        repeat_from: The event at which the last update begins. That update is repeated if it leaves as much as it
            found (`match_replacements`).
        repeats: How often, at most; two in a row that give nothing back end it.
        optional: Blocks that are done without where there is no memory for them, and what each is for: once one was
            refused, none is asked for again that is for the same.

    Raises:
        ValueError: The settings allow a share of the card, and do not say of how much.
    """
    allocator = CachingAllocator(capacity, settings)
    last = len(events) if repeat_from is None else repeat_from
    replacements = match_replacements(events, sizes, last)
    again = repeats if replacements is not None and events[last:] else 0
    replayer = EventReplayer(allocator, sizes, optional)
    number = released = quiet = 0
    failed: tuple[int, int] | None = None
    for index in range(2 + again):
        update = events[last:] if index else events[:last]
        before, earlier = allocator.releases, released
        if index > 1 and replacements:
            replayer.hand_over(replacements)
        failed = replayer.run(update)
        if failed is not None:
            failed = failed[0] + number, failed[1]
            break
        number += len(update)
        released = allocator.releases - before
        quiet = 0 if released else quiet + 1
        if index > 1 and quiet > 1:
            break
    is_slow = repeat_from is not None and quiet < max(1, min(again, 2))
    failed_at, asked_bytes = (None, 0) if failed is None else failed
    return ReplayResult(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.retries,
        repeat_retries=max(released, earlier) if is_slow else 0,
        failed_at=failed_at,
        asked_bytes=asked_bytes,
        valid_from_bytes=allocator.peak_reserved_bytes,
        valid_below_bytes=allocator.least_refused_bytes,
    )


class EventReplayer:
    """Replays stretches of events, one after the other; arguments as `replay` takes them."""

    def __init__(
        self, allocator: CachingAllocator, sizes: Sequence[int], optional: Mapping[int, Hashable] = _NOTHING
    ) -> None:
        self._allocator, self._sizes, self._optional = allocator, sizes, optional
        self._blocks: dict[int, Block] = {}
        self._without: set[int] = set()

    def run(self, events: Sequence[int]) -> tuple[int, int] | None:
        """Replay `events`; returns the index of the one that failed and what it asked for, if one did."""
        malloc, free = self._allocator.malloc, self._allocator.free
        sizes, blocks, without = self._sizes, self._blocks, self._without
        left, event = iter(events), 0
        while True:
            try:
                for event in left:
                    if event < 0:
                        block = blocks.pop(~event, None)
                        if block is not None:
                            free(block)
                    elif sizes[event] and event not in without:
                        blocks[event] = malloc(sizes[event])
                return None
            except CudaOutOfMemory as error:
                if event not in self._optional:
                    return list(events).index(event), error.asked_bytes  # A block is allocated once.
                purpose = self._optional[event]
                without.update(block for block, known in self._optional.items() if known == purpose)

    def hand_over(self, replacements: Mapping[int, int]) -> None:
        """Have the blocks that were left stand for those that were found: the same events are replayed again."""
        left = {
            found: self._blocks.pop(replacement)
            for found, replacement in replacements.items()
            if replacement in self._blocks
        }
        self._blocks.update(left)


def match_replacements(events: Sequence[int], sizes: Sequence[int], start: int) -> dict[int, int] | None:
    """Of each block that is there at `start` and freed later, one as large that is allocated later and stays.

    Outputs that a loop keeps until the next ones are there are such. None where some block has none: what comes
    after leaves something else than it found.

    >>> match_replacements((0, 1, ~1, 2, ~2), (8, 8, 8), 3), match_replacements((0, 1, ~1, 2), (8, 8, 8), 3)
    ({}, None)
    >>> match_replacements((0, 1, ~0, 2, ~2), (8, 8, 8), 1), match_replacements((0, 1, ~0), (8, 9), 1)
    ({0: 1}, None)
    """
    alive: dict[int, None] = {}
    found: list[int] = []
    for event in events[start:]:
        if event >= 0:
            alive[event] = None
        elif ~event in alive:
            del alive[~event]
        else:
            found.append(~event)
    left = sorted(alive, key=sizes.__getitem__)
    found.sort(key=sizes.__getitem__)
    if [sizes[block] for block in found] != [sizes[block] for block in left]:
        return None
    return dict(zip(found, left, strict=True))


def least_capacity(
    events: Sequence[int],
    sizes: Sequence[int],
    settings: AllocatorSettings | None = None,
    repeat_from: int | None = None,
    *,
    most: int | None = None,
    optional: Mapping[int, Hashable] = _NOTHING,
) -> int:
    """The smallest capacity at which a trace goes through.

    A replay tells what comes of every capacity from its peak to below the least that CUDA refused it, so that a
    bisection needs few of them. More memory may make an allocator place blocks worse, so that some capacity above the
    answer may fail and some below it may do: whether a card's own does, a replay at that capacity tells.

    Arguments are as `replay` takes them; `most` is a capacity at which it goes through.
    """

    def at(capacity: int | None) -> ReplayResult:
        return replay(events, sizes, capacity=capacity, settings=settings, repeat_from=repeat_from, optional=optional)

    found = at(most)
    if not found.fits:
        raise ValueError("the trace does not go through: the settings allow too little of the card, or `most` is less")
    enough, fails = found.valid_from_bytes, _floor_bytes(events, sizes, optional) - 1
    while enough - fails > 1:
        tried = at((enough + fails) // 2)
        if tried.fits:
            enough = tried.valid_from_bytes
        else:
            assert tried.valid_below_bytes is not None
            fails = tried.valid_below_bytes - 1
    return enough


def _floor_bytes(events: Sequence[int], sizes: Sequence[int], optional: Container[int]) -> int:
    """Return what no allocator of such segments can do without: those of the small blocks alive, and the large."""
    alive, most = {True: 0, False: 0}, 0
    for event in events:
        block = event if event >= 0 else ~event
        size = 0 if block in optional else sizes[block]
        alive[size <= SMALL_BYTES] += size if event >= 0 else -size
        if event >= 0:
            most = max(most, sum(-(-held // LARGE_GRAIN_BYTES) for held in alive.values()))
    return most * LARGE_GRAIN_BYTES


def reserved_over_time(
    events: Sequence[int], sizes: Sequence[int], settings: AllocatorSettings | None = None, repeat_from: int = 0
) -> list[int]:
    """The bytes held after each event where nothing limits them, as `replay` has it."""
    allocator = CachingAllocator(None, settings)
    replayer = EventReplayer(allocator, sizes)

    def run(stretch: Sequence[int]) -> list[int]:
        held = []
        for event in stretch:
            replayer.run((event,))
            held.append(allocator.reserved_bytes)
        return held

    held = run(events)
    replacements = match_replacements(events, sizes, repeat_from)
    if replacements is not None:
        replayer.hand_over(replacements)
        held[repeat_from:] = run(events[repeat_from:])
    return held


@dataclass(frozen=True)
class SizedTrace:
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
    optional: Mapping[int, Workspace] = field(default_factory=dict)

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


class Replayer:
    """Replays traces on one card under one torch."""

    def __init__(self, card: Card, settings: AllocatorSettings, torch_version: tuple[int, int]) -> None:
        self._card, self._torch_version = card, torch_version
        self._settings = settings
        self._estimates: dict[Workspace, Estimate] = {}
        self._known: dict[Trace, tuple[SizedTrace, ReplayResult]] = {}

    def with_sizes(self, trace: Trace) -> SizedTrace:
        """Return what `trace` asks for, block by block."""
        return self._uncapped(trace)[0]

    def peak_bytes(self, trace: Trace) -> int:
        """The most the allocator holds where nothing limits it."""
        return self._uncapped(trace)[1].peak_reserved_bytes

    def least_bytes(self, trace: Trace, limit_bytes: int) -> int:
        """The smallest capacity at which `trace` goes through: within a limit, or where it takes more, beyond."""
        sized = self.with_sizes(trace)
        most = limit_bytes if self.trial(trace, limit_bytes).ran else self.peak_bytes(trace)
        return least_capacity(
            trace.events, sized.sizes, self._settings, trace.last_update, most=most, optional=sized.optional
        )

    def held_bytes(self, trace: Trace, limit_bytes: int) -> int:
        """The most the allocator holds within a limit, or until then where `trace` does not go through."""
        return self._within(limit_bytes, *self._uncapped(trace)).peak_reserved_bytes

    def reserved_bytes(self, trace: Trace) -> list[int]:
        """Return what the allocator holds after each event without a limit, of the last update when it is repeated."""
        return reserved_over_time(trace.events, self.with_sizes(trace).sizes, self._settings, trace.last_update)

    def expanding(self) -> Replayer | None:
        """The same under an allocator whose segments grow; None where they do."""
        if self._settings.expandable_segments:
            return None
        settings = dataclasses.replace(self._settings, expandable_segments=True)
        return Replayer(self._card, settings, self._torch_version)

    def trial(self, trace: Trace, limit_bytes: int) -> Trial:
        """The trial of `trace` within a limit; its peaks are those without one."""
        sized, roomy = self._uncapped(trace)
        held = self._within(limit_bytes, sized, roomy)
        about: dict[str, Any] = {
            "parts": trace.parts,
            "peak_allocated_bytes": roomy.peak_allocated_bytes,
            "peak_reserved_bytes": roomy.peak_reserved_bytes,
            "allocator_retries": held.retries,
        }
        if held.failed_at is not None:
            phase = sized.phase_at(held.failed_at)
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

    def _uncapped(self, trace: Trace) -> tuple[SizedTrace, ReplayResult]:
        """The sized trace of `trace`, and its replay where nothing limits it; asked for more than once."""
        if trace not in self._known:
            sized = self._weigh(trace)
            self._known[trace] = sized, self._replay(sized, None)
        return self._known[trace]

    def _weigh(self, trace: Trace) -> SizedTrace:
        sizes: list[int] = []
        bands: dict[int, int] = {}
        guessed: dict[str, None] = {}
        optional: dict[int, Workspace] = {}
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
        return SizedTrace(trace, tuple(sizes), _most_at_once(trace.events, bands), tuple(guessed), optional)

    def _within(self, limit_bytes: int, sized: SizedTrace, roomy: ReplayResult) -> ReplayResult:
        return roomy if roomy.valid_from_bytes <= limit_bytes else self._replay(sized, limit_bytes)

    def _replay(self, sized: SizedTrace, capacity: int | None) -> ReplayResult:
        """Return what nothing limits is settled by the third update; what has to give back is asked for longer."""
        return replay(
            sized.trace.events,
            sized.sizes,
            capacity=capacity,
            settings=self._settings,
            repeat_from=sized.trace.last_update,
            repeats=1 if capacity is None else _SETTLED_BY,
            optional=sized.optional,
        )
