"""A recorded history, replayed by the simulated allocator: equal addresses, or the first difference.

The replay follows the record in what CUDA decides: where segments lie, and when memory goes back. All else must be the
same: whether a request is served from the cache, how much CUDA is asked for, and the address of each block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from autoaccum.devices.simulated.allocator.blocks import Block, BlockPool
from autoaccum.devices.simulated.allocator.caching_allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
)
from autoaccum.devices.simulated.allocator.recording import Entry, HeldBefore, Recording
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings
from autoaccum.units import format_bytes


@dataclass(frozen=True)
class ReplayDifference:
    """The first event that the simulated allocator answers otherwise.

    Attributes:
        event: Its number in the record, from 0.
        action: `alloc`, `free_completed` or `segment_free`.
        bytes: The bytes of the event.
        line: The user's line, as `train.py:12`; empty if it was not recorded.
        recorded, replayed: The two answers, as phrases.
        certain: False if blocks from before the record may have been larger than was assumed.
    """

    event: int
    action: str
    bytes: int
    line: str
    recorded: str
    replayed: str
    certain: bool


def why_not_replayed(recording: Recording) -> str | None:
    """Return why a recording is not replayed; None if it is."""
    if recording.settings.expandable_segments or any(segment.is_expandable for segment in recording.segments):
        return "it has expandable segments, whose addresses are CUDA's choice"
    if any(segment.segment_pool_id != (0, 0) for segment in recording.segments):
        return "it has memory pools of its own (captured graphs)"
    return None


def replay_recording(recording: Recording) -> ReplayDifference | None:
    """Return the first difference between a recording and its replay; None if all addresses are equal.

    How far a block from before the record reached is not recorded if it is freed: the remainder of a segment below
    1 MiB may have been part of it. The first block behind it shows that, and the replay starts again.
    """
    sizes = dict(recording.before.sizes)
    while True:
        allocator = _FollowingAllocator(recording.settings, recording.before, sizes)
        for number, entry in enumerate(recording.entries):
            try:
                allocator.follow(entry)
            except _Differs as differs:
                if differs.size is None:
                    certain = not allocator.guesses
                    return ReplayDifference(number, entry.action, entry.size, entry.line, *differs.answers, certain)
                sizes |= differs.size
                break
        else:
            return None


class _Differs(Exception):
    """The record's answer and the replay's; and the size of a block from before, by address, that explains both."""

    def __init__(self, recorded: str, replayed: str, size: dict[int, int] | None = None) -> None:
        super().__init__(recorded, replayed)
        self.answers, self.size = (recorded, replayed), size


class _FollowingAllocator(CachingAllocator):
    """An allocator whose segments come and go as in a record."""

    def __init__(self, settings: AllocatorSettings, before: HeldBefore, sizes: Mapping[int, int]) -> None:
        super().__init__(None, settings)
        self._known, self._ends = sizes, dict[int, int]()
        self._blocks: dict[int, Block] = {}
        self._arrived: deque[Entry] = deque()
        for address, (size, stream) in before.segments.items():
            inside = sorted(at for at in before.used if address <= at < address + size)
            pool = self._pools_of(stream)[size != SMALL_SEGMENT_BYTES]
            self._restore(Block(pool, address, size), [(at, before.used[at]) for at in inside])

    @property
    def guesses(self) -> bool:
        """Return whether the size of a block from before the record is a guess."""
        return bool(self._ends)

    def follow(self, entry: Entry) -> None:
        """Do what an event says.

        Raises:
            _Differs: The result differs.
        """
        if entry.action == "segment_alloc":
            self._arrived.append(entry)
        elif entry.action == "segment_free":
            self._give_back(entry)
        elif entry.action == "free_completed":
            freed = self._blocks.pop(entry.addr, None)
            if freed is None:
                raise _Differs(f"a block at {entry.addr:#x} is freed", "there is none")
            self.free(freed)
        elif entry.action == "alloc":
            block = self.malloc(entry.size, entry.stream)
            if self._arrived:
                new = f"a new segment of {format_bytes(self._arrived.popleft().size)}"
                raise _Differs(new, f"cached memory at {block.address:#x}")
            if block.address != entry.addr:
                remainder = entry.addr - block.address
                held = self._ends.get(block.address) if 0 < remainder <= SMALL_BYTES else None
                size = None if held is None else {held: entry.addr - held}
                raise _Differs(f"address {entry.addr:#x}", f"address {block.address:#x}", size)
            self._blocks[entry.addr] = block

    def _alloc_block(self, pool: BlockPool, size: int) -> Block | None:
        wanted = self._get_allocation_size(size)
        asked = f"a new segment of {format_bytes(wanted)}"
        if not self._arrived:
            raise _Differs("cached memory", asked)
        segment = self._arrived.popleft()
        if segment.size != wanted:
            raise _Differs(f"a new segment of {format_bytes(segment.size)}", asked)
        self._cuda_malloc(wanted)
        return Block(pool, segment.addr, wanted)

    def _give_back(self, entry: Entry) -> None:
        for pools in self._pools.values():
            for block in (block for pool in pools for block in pool.free_blocks()):
                if block.address == entry.addr and block.size == entry.size:
                    self._release_block(block)
                    return
        raise _Differs("the segment is free, and goes back", "some of it is used")

    def _restore(self, segment: Block, used: list[tuple[int, int]]) -> None:
        """Divide a segment that was there before into the blocks that were used, and free ones between them."""
        pool, end = segment.pool, segment.address + segment.size
        rest: Block | None = segment
        for (address, requested), (following, _) in pairwise([*used, (end, 0)]):
            assert rest is not None
            if address > rest.address:
                free, rest = rest, rest.split_at(address - rest.address)
                pool.insert(free)
            block, size = rest, self._known.get(address) or self._round_size(requested)
            left = following - address - size
            # A remainder is part of its block where the allocator would not have split it off.
            if left > 0 and (pool.small or (left > SMALL_BYTES and size < self._max_split)):
                rest = block.split_at(size)
                if address not in self._known and not pool.small:
                    self._ends[rest.address] = address
            else:
                rest = block.split_at(following - address) if following < end else None
            block.allocated = True
            self._blocks[address] = block
        if rest is not None:
            pool.insert(rest)
