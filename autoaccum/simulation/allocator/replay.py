"""Replays of traces in the allocator of one card: whether a trace fits, its peak, the least capacity it needs."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from autoaccum.simulation.allocator.blocks import Block
from autoaccum.simulation.allocator.caching_allocator import (
    LARGE_GRAIN_BYTES,
    SMALL_BYTES,
    AllocatorSettings,
    CachingAllocator,
    CudaOutOfMemoryError,
)
from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.workspace_sizes import Estimate, estimate
from autoaccum.simulation.releases import Release, holds
from autoaccum.simulation.trace_records import EMPTY_CACHE, EMPTY_CACHE_ONCE, Phase, Trace, Workspace

_MAX_REPEATS = 8
"""The updates after which an allocator has settled, or never does: few of those observed took longer."""


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        repeat_retries: How many requests of each repeated update still had to release cached memory when the replay
            ended, so that training stays slow. PyTorch counts only some of these among its retries.
        failed_at: The index of the event that found no memory; None if all did. Events of repeated updates count on.
        requested_bytes: The bytes that this event requested; 0 if none failed.
        valid_below_bytes: Each capacity from `peak_reserved_bytes` to below this gives the same result; None: no bound.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int = 0
    repeat_retries: int = 0
    failed_at: int | None = None
    requested_bytes: int = 0
    valid_below_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Return whether every request found memory."""
        return self.failed_at is None


@dataclass(frozen=True, eq=False)
class SizedTrace:
    """A trace with the size of each block, workspaces included; it keeps the results of its replays.

    Attributes:
        trace: The trace, whose own sizes do not count.
        sizes: The bytes of each block, or `EMPTY_CACHE` or `EMPTY_CACHE_ONCE`. As in PyTorch, blocks of 0 bytes are
            never allocated.
        uncertainty_bytes: How far off the sum of the blocks alive may be, at most at any time.
        guessed: The rules of the blocks that count in the band.
        optional: Blocks that may find no memory, with the purpose of each: once one is refused, no other block with
            the same purpose is requested.
    """

    trace: Trace
    sizes: Sequence[int]
    uncertainty_bytes: int = 0
    guessed: tuple[str, ...] = ()
    optional: Mapping[int, Hashable] = field(default_factory=dict)
    _results: dict[tuple[AllocatorSettings, bool, int], list[ReplayResult]] = field(
        default_factory=dict, init=False, repr=False
    )

    def phase_at(self, event: int) -> Phase:
        """Return the phase of an event; for a repeated update, that of the same event the first time."""
        last, end = self.trace.last_update, len(self.trace.events)
        if event >= end:
            event = last + (event - last) % (end - last)
        index = bisect_right(self.trace.phases, event, key=lambda phase: phase[0]) - 1
        return self.trace.phases[max(index, 0)][1]

    @cached_property
    def replacements(self) -> Mapping[int, int] | None:
        """By each block that the last update finds and frees, one as large on the same stream that it leaves.

        An example are outputs that a loop keeps until it has the next ones. None: some block has no such match, so that
        the update leaves something else than it finds, and cannot be repeated.
        """
        alive: dict[int, None] = {}
        freed: list[int] = []
        for event in self.trace.events[self.trace.last_update :]:
            if event >= 0:
                alive[event] = None
            elif ~event in alive:
                del alive[~event]
            else:
                freed.append(~event)
        streams = self.trace.streams

        def kind(block: int) -> tuple[int, int]:
            return self.sizes[block], streams[block] if streams else 0

        left = sorted(alive, key=kind)
        freed.sort(key=kind)
        return dict(zip(freed, left, strict=True)) if [*map(kind, freed)] == [*map(kind, left)] else None

    def replay(
        self, settings: AllocatorSettings | None = None, capacity: int | None = None, repeats: int = 1
    ) -> ReplayResult:
        """Replay the trace in an allocator of this capacity; None is no limit.

        The last update is repeated up to `repeats` times, if that is possible, until two in a row release nothing.
        """
        settings = settings or AllocatorSettings()
        kind = dataclasses.replace(settings, total_bytes=None)  # Addresses are enough on any card.
        results = self._results.setdefault((kind, capacity is None, repeats), [])
        for result in results:
            below = result.valid_below_bytes
            if capacity is None or (result.peak_reserved_bytes <= capacity and (below is None or capacity < below)):
                return result
        results.append(self._replay(CachingAllocator(capacity, settings), repeats))
        return results[-1]

    def _replay(self, allocator: CachingAllocator, repeats: int) -> ReplayResult:
        events, last = self.trace.events, self.trace.last_update
        again = repeats if self.replacements is not None and events[last:] else 0
        running = EventReplay(allocator, self)
        number = released = quiet = earlier = 0
        failed: tuple[int, int] | None = None
        for index in range(2 + again):
            update = events[last:] if index else events[:last]
            before, earlier = allocator.releases, released
            if index > 1:
                running.carry_over()
            failed = running.run(update)
            if failed is not None:
                failed = failed[0] + number, failed[1]
                break
            number += len(update)
            released = allocator.releases - before
            quiet = 0 if released else quiet + 1
            if index > 1 and quiet > 1:
                break
        failed_at, requested_bytes = (None, 0) if failed is None else failed
        return ReplayResult(
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            retries=allocator.retries,
            repeat_retries=max(released, earlier) if quiet < max(1, min(again, 2)) else 0,
            failed_at=failed_at,
            requested_bytes=requested_bytes,
            valid_below_bytes=allocator.least_refused_bytes,
        )

    def least_capacity(self, settings: AllocatorSettings | None = None, known: ReplayResult | None = None) -> int:
        """Return a smallest capacity at which the trace fits, by bisection from a `known` result that fits.

        One replay settles all capacities from its peak to below the least request that CUDA refused, so that few
        replays are needed. With more memory an allocator may place blocks worse: some capacity above the result may
        fail, and some below may fit. A replay at the capacity of a card decides for that card.
        """
        known = known or self.replay(settings)
        enough, fails = known.peak_reserved_bytes, self._lower_bound_bytes() - 1
        while enough - fails > 1:
            tried = self.replay(settings, (enough + fails) // 2)
            if tried.fits:
                enough = tried.peak_reserved_bytes
            else:
                assert tried.valid_below_bytes is not None
                fails = tried.valid_below_bytes - 1
        return enough

    def _lower_bound_bytes(self) -> int:
        """Return the least bytes of any allocator with such segments: those of the small and the large blocks alive."""
        alive, most = {True: 0, False: 0}, 0
        for event in self.trace.events:
            block = event if event >= 0 else ~event
            size = 0 if block in self.optional else self.sizes[block]
            alive[size <= SMALL_BYTES] += size if event >= 0 else -size
            if event >= 0:
                segments = -(-alive[True] // LARGE_GRAIN_BYTES) - (-alive[False] // LARGE_GRAIN_BYTES)
                most = max(most, segments)
        return most * LARGE_GRAIN_BYTES

    def reserved_over_time(self, settings: AllocatorSettings | None = None) -> list[int]:
        """Return the bytes reserved after each event without a limit, in the last update once it is repeated."""
        allocator = CachingAllocator(None, settings)
        running = EventReplay(allocator, self)

        def run(part: Sequence[int]) -> list[int]:
            reserved = []
            for event in part:
                running.run((event,))
                reserved.append(allocator.reserved_bytes)
            return reserved

        events, last = self.trace.events, self.trace.last_update
        reserved = run(events)
        if self.replacements is not None:
            running.carry_over()
            reserved[last:] = run(events[last:])
        return reserved


class EventReplay:
    """Replays ranges of the events of a trace in an allocator, one after the other."""

    def __init__(self, allocator: CachingAllocator, sized: SizedTrace) -> None:
        self._allocator, self._sized = allocator, sized
        self._blocks: dict[int, Block] = {}
        self._emptied: set[int] = set()
        self._sizes = sized.sizes

    def run(self, events: Sequence[int]) -> tuple[int, int] | None:
        """Replay `events`; return the index of the event that failed and the bytes it requested, if one did."""
        malloc, free = self._allocator.malloc, self._allocator.free
        sizes, optional, blocks = self._sizes, self._sized.optional, self._blocks
        streams = self._sized.trace.streams or bytes(len(sizes))
        left, event = iter(events), 0
        while True:
            try:
                for event in left:
                    if event < 0:
                        block = blocks.pop(~event, None)
                        if block is not None:
                            free(block)
                    elif (size := sizes[event]) > 0:
                        blocks[event] = malloc(size, streams[event])
                    elif size == EMPTY_CACHE or (size == EMPTY_CACHE_ONCE and event not in self._emptied):
                        self._emptied.add(event)
                        self._allocator.release_cached_blocks()
                return None
            except CudaOutOfMemoryError as error:
                if event not in optional:
                    return list(events).index(event), error.requested_bytes  # A block is allocated once.
                without = {block for block, purpose in optional.items() if purpose == optional[event]}
                sizes = self._sizes = [0 if block in without else size for block, size in enumerate(sizes)]

    def carry_over(self) -> None:
        """Give the blocks that an update left the numbers of those it found, so that its events can be repeated."""
        blocks, pairs = self._blocks, (self._sized.replacements or {}).items()
        blocks.update({freed: blocks.pop(left) for freed, left in pairs if left in blocks})


@dataclass(frozen=True)
class Replays:
    """What cards have in common whose kernels take equal workspaces.

    Attributes:
        sized: Traces with sizes, by the estimates of their workspaces.
        unlimited: The replay of a trace without a limit on the first card that had one.
    """

    sized: dict[tuple[Trace, tuple[Estimate, ...]], SizedTrace] = field(default_factory=dict)
    unlimited: dict[Trace, ReplayResult] = field(default_factory=dict)


class Replayer:
    """Replays traces on one card under one release of PyTorch; cards may have the `replays` in common."""

    def __init__(
        self,
        card: Card,
        settings: AllocatorSettings,
        torch_version: Release,
        replays: Replays | None = None,
    ) -> None:
        self._card, self._torch_version = card, torch_version
        self.settings = dataclasses.replace(settings, by_address=not holds("older_segments_first", torch_version))
        self._replays = replays or Replays()
        self._known: dict[Trace, tuple[SizedTrace, ReplayResult]] = {}

    def with_sizes(self, trace: Trace) -> SizedTrace:
        """Return `trace` with the size of each block."""
        return self._unlimited(trace)[0]

    def peak_bytes(self, trace: Trace) -> int:
        """Return the largest number of bytes that the allocator reserves without a limit."""
        return self._unlimited(trace)[1].peak_reserved_bytes

    def about_peak_bytes(self, trace: Trace) -> int:
        """Return the same, maybe of another card that shares its replays."""
        unlimited = self._replays.unlimited.get(trace)
        return self.peak_bytes(trace) if unlimited is None else unlimited.peak_reserved_bytes

    def min_budget_bytes(self, traces: Sequence[Trace], limit_bytes: int) -> int:
        """Return the smallest capacity at which all traces fit: within a limit, or beyond it if they do not fit there.

        That of one is sought where it does not fit in what suffices for larger ones.
        """
        least = 0
        for trace in sorted(traces, key=self.peak_bytes, reverse=True):
            sized, unlimited = self._unlimited(trace)
            if least and self._replay_within(least, sized, unlimited, 1).fits:
                continue
            within = self._replay_within(limit_bytes, sized, unlimited)
            least = max(least, sized.least_capacity(self.settings, within if within.fits else unlimited))
        return least

    def replay(self, trace: Trace, limit_bytes: int) -> tuple[SizedTrace, ReplayResult, ReplayResult]:
        """Return `trace` with sizes, its replay without a limit, and that within `limit_bytes`.

        If it does not fit, the replay without a limit is maybe that of another card with equal kernels.
        """
        elsewhere = None if trace in self._known else self._replays.unlimited.get(trace)
        if elsewhere is not None and elsewhere.peak_reserved_bytes > limit_bytes:
            sized = self._with_sizes(trace)
            within = self._replay_within(limit_bytes, sized, elsewhere)
            if not within.fits:
                return sized, elsewhere, within
        sized, unlimited = self._unlimited(trace)
        return sized, unlimited, self._replay_within(limit_bytes, sized, unlimited)

    def expanding(self) -> Replayer | None:
        """Return a replayer with expandable segments; None if this one has them."""
        if self.settings.expandable_segments:
            return None
        settings = dataclasses.replace(self.settings, expandable_segments=True)
        return Replayer(self._card, settings, self._torch_version)

    def _unlimited(self, trace: Trace) -> tuple[SizedTrace, ReplayResult]:
        """Return the sized trace, and its replay without a limit; both are cached."""
        if trace not in self._known:
            sized = self._with_sizes(trace)
            self._known[trace] = sized, sized.replay(self.settings)
            self._replays.unlimited.setdefault(trace, self._known[trace][1])
        return self._known[trace]

    def _replay_within(
        self, limit_bytes: int, sized: SizedTrace, unlimited: ReplayResult, repeats: int = _MAX_REPEATS
    ) -> ReplayResult:
        """Return the result within a limit; without one, an allocator has settled by the third update."""
        if unlimited.peak_reserved_bytes <= limit_bytes:
            return unlimited
        return sized.replay(self.settings, limit_bytes, repeats)

    def _with_sizes(self, trace: Trace) -> SizedTrace:
        """Return a trace with the size of each block; the same object for equal estimates of its workspaces."""
        estimates = {
            workspace: estimate(workspace, self._card, self._torch_version)
            for workspace in dict.fromkeys(trace.workspaces.values())
        }
        key = trace, tuple(estimates.values())
        if key not in self._replays.sized:
            self._replays.sized[key] = _size(trace, estimates)
        return self._replays.sized[key]


def _size(trace: Trace, estimates: Mapping[Workspace, Estimate]) -> SizedTrace:
    """Return a trace with the estimated sizes of its workspaces."""
    of_blocks = {block: estimates[workspace] for block, workspace in trace.workspaces.items()}
    sizes: list[Any] = list(trace.sizes)
    for block, taken in of_blocks.items():
        sizes[block] = taken.bytes
    bands = {block: estimate.uncertainty_bytes for block, estimate in of_blocks.items() if estimate.uncertainty_bytes}
    changes = (bands.get(event, 0) - bands.get(~event, 0) for event in (trace.events if bands else ()))
    return SizedTrace(
        trace,
        tuple(sizes),
        max(accumulate(changes), default=0),
        tuple(dict.fromkeys(trace.workspaces[block].rule for block in bands)),
        {block: trace.workspaces[block] for block, estimate in of_blocks.items() if estimate.optional},
    )
