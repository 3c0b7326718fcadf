"""Replays of the events of a trace in an allocator: whether it fits, its peak, the least capacity it needs."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoaccum.simulation.allocator.blocks import Block
from autoaccum.simulation.allocator.caching_allocator import (
    LARGE_GRAIN_BYTES,
    SMALL_BYTES,
    CachingAllocator,
    CudaOutOfMemoryError,
)
from autoaccum.simulation.allocator.settings import AllocatorSettings
from autoaccum.simulation.trace_records import EMPTY_CACHE

_NOTHING: Mapping[int, Hashable] = {}


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


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    capacity: int | None = None,
    settings: AllocatorSettings | None = None,
    repeat_from: int | None = None,
    repeats: int = 1,
    optional: Mapping[int, Hashable] = _NOTHING,
    streams: Sequence[int] = (),
) -> ReplayResult:
    """Replay the events of a trace in an allocator.

    Args:
        events: In order: the number of a block that is allocated, or `~number` of one that is freed.
        sizes: The bytes of each block, or `EMPTY_CACHE`. As in PyTorch, blocks of 0 bytes are never allocated.
        capacity: The bytes of the card for segments; None is no limit.
        settings: The settings of the allocator.
        repeat_from: The event at which the last update begins. That update is repeated if it leaves as much as it
            found (`match_replacements`).
        repeats: How often to repeat it at most; two updates in a row that release nothing end the replay.
        optional: Blocks that may find no memory, with the purpose of each: once one is refused, no other block with
            the same purpose is requested.
        streams: The stream of each block; empty: all are on the default stream.

    Raises:
        ValueError: The settings allow a share of the card without the total of the card.
    """
    allocator = CachingAllocator(capacity, settings)
    last = len(events) if repeat_from is None else repeat_from
    replacements = match_replacements(events, sizes, last, streams)
    again = repeats if replacements is not None and events[last:] else 0
    replayer = EventReplayer(allocator, sizes, optional, streams)
    number = released = quiet = 0
    failed: tuple[int, int] | None = None
    for index in range(2 + again):
        update = events[last:] if index else events[:last]
        before, earlier = allocator.releases, released
        if index > 1 and replacements:
            replayer.carry_over(replacements)
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
    failed_at, requested_bytes = (None, 0) if failed is None else failed
    return ReplayResult(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.retries,
        repeat_retries=max(released, earlier) if is_slow else 0,
        failed_at=failed_at,
        requested_bytes=requested_bytes,
        valid_below_bytes=allocator.least_refused_bytes,
    )


class EventReplayer:
    """Replays ranges of events, one after the other. Arguments: as of `replay`."""

    def __init__(
        self,
        allocator: CachingAllocator,
        sizes: Sequence[int],
        optional: Mapping[int, Hashable] = _NOTHING,
        streams: Sequence[int] = (),
    ) -> None:
        self._allocator, self._sizes, self._optional = allocator, sizes, optional
        self._streams = streams or bytes(len(sizes))
        self._blocks: dict[int, Block] = {}
        self._without: set[int] = set()

    def run(self, events: Sequence[int]) -> tuple[int, int] | None:
        """Replay `events`; return the index of the event that failed and the bytes it requested, if one did."""
        malloc, free = self._allocator.malloc, self._allocator.free
        sizes, streams, blocks, without = self._sizes, self._streams, self._blocks, self._without
        left, event = iter(events), 0
        while True:
            try:
                for event in left:
                    if event < 0:
                        block = blocks.pop(~event, None)
                        if block is not None:
                            free(block)
                    elif (size := sizes[event]) > 0:
                        if event not in without:
                            blocks[event] = malloc(size, streams[event])
                    elif size == EMPTY_CACHE:
                        self._allocator.release_cached_blocks()
                return None
            except CudaOutOfMemoryError as error:
                if event not in self._optional:
                    return list(events).index(event), error.requested_bytes  # A block is allocated once.
                purpose = self._optional[event]
                without.update(block for block, known in self._optional.items() if known == purpose)

    def carry_over(self, replacements: Mapping[int, int]) -> None:
        """Give the blocks that an update left the numbers of those it found, so that its events can be repeated."""
        blocks = self._blocks
        blocks.update({found: blocks.pop(left) for found, left in replacements.items() if left in blocks})


def match_replacements(
    events: Sequence[int], sizes: Sequence[int], start: int, streams: Sequence[int] = ()
) -> dict[int, int] | None:
    """Match each block that is alive at `start` and freed later with one as large that is allocated later and stays.

    Both are on the same stream.

    An example are outputs that a loop keeps until it has the next ones. The result is None if some block has no match:
    the events then leave something else than they found.

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

    def kind(block: int) -> tuple[int, int]:
        return sizes[block], streams[block] if streams else 0

    left = sorted(alive, key=kind)
    found.sort(key=kind)
    if [*map(kind, found)] != [*map(kind, left)]:
        return None
    return dict(zip(found, left, strict=True))


def least_capacity(
    events: Sequence[int],
    sizes: Sequence[int],
    settings: AllocatorSettings | None = None,
    repeat_from: int | None = None,
    *,
    known: ReplayResult | None = None,
    optional: Mapping[int, Hashable] = _NOTHING,
    streams: Sequence[int] = (),
    at: Callable[[int | None], ReplayResult] | None = None,
) -> int:
    """Return a smallest capacity at which a trace fits, by bisection.

    One replay settles all capacities from its peak to below the least request that CUDA refused, so that few replays
    are needed. With more memory an allocator may place blocks worse: some capacity above the result may fail, and some
    below may fit. A replay at the capacity of a card decides for that card.

    Args: as of `replay`; `known` is the result of one at which the trace fits, by default of one without a limit, and
    `at` replays the same events at a capacity, where results are kept.

    Raises:
        ValueError: The trace does not fit in the share that the settings allow.
    """

    def replay_at(capacity: int | None) -> ReplayResult:
        limits: dict[str, Any] = {"capacity": capacity, "settings": settings, "repeat_from": repeat_from}
        return replay(events, sizes, optional=optional, streams=streams, **limits)

    at = at or replay_at
    known = known or at(None)
    if not known.fits:
        raise ValueError("the trace does not fit: the settings allow too little of the card")
    enough, fails = known.peak_reserved_bytes, _lower_bound_bytes(events, sizes, optional) - 1
    while enough - fails > 1:
        tried = at((enough + fails) // 2)
        if tried.fits:
            enough = tried.peak_reserved_bytes
        else:
            assert tried.valid_below_bytes is not None
            fails = tried.valid_below_bytes - 1
    return enough


def _lower_bound_bytes(events: Sequence[int], sizes: Sequence[int], optional: Container[int]) -> int:
    """Return the least bytes of any allocator with such segments: those of the small and of the large blocks alive."""
    alive, most = {True: 0, False: 0}, 0
    for event in events:
        block = event if event >= 0 else ~event
        size = 0 if block in optional else sizes[block]
        alive[size <= SMALL_BYTES] += size if event >= 0 else -size
        if event >= 0:
            held = -(-alive[True] // LARGE_GRAIN_BYTES) - (-alive[False] // LARGE_GRAIN_BYTES)
            most = max(most, held)
    return most * LARGE_GRAIN_BYTES


def reserved_over_time(
    events: Sequence[int],
    sizes: Sequence[int],
    settings: AllocatorSettings | None = None,
    repeat_from: int = 0,
    *,
    streams: Sequence[int] = (),
) -> list[int]:
    """Return the bytes reserved after each event without a limit, in the last update once it is repeated."""
    allocator = CachingAllocator(None, settings)
    replayer = EventReplayer(allocator, sizes, streams=streams)

    def run(part: Sequence[int]) -> list[int]:
        held = []
        for event in part:
            replayer.run((event,))
            held.append(allocator.reserved_bytes)
        return held

    held = run(events)
    replacements = match_replacements(events, sizes, repeat_from, streams)
    if replacements is not None:
        replayer.carry_over(replacements)
        held[repeat_from:] = run(events[repeat_from:])
    return held
