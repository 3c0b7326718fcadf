"""Snapshots that `torch.cuda.memory._dump_snapshot` wrote: read without running anything in them, and replayed.

The replay by the simulated allocator follows the record in what CUDA decides: where segments lie, and when memory goes
back. All else must be the same: whether a request is served from the cache, how much CUDA is asked for, and the address
of each block.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from autoaccum.errors import UsageError, first_line
from autoaccum.serialization import RecordError, read_record
from autoaccum.simulation.allocator.blocks import Block, BlockPool
from autoaccum.simulation.allocator.caching_allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
)
from autoaccum.simulation.allocator.settings import AllocatorSettings, read_settings
from autoaccum.units import format_bytes

_CONF = "PYTORCH_CUDA_ALLOC_CONF"
_HOW = "call torch.cuda.memory._record_memory_history() before the updates and _dump_snapshot(...) behind one"
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One event: `addr`, and `size` as it was requested; `frames` is the call stack, the innermost frame first."""

    action: str
    size: int = 0
    addr: int = 0
    stream: int = 0
    frames: Any = ()

    @property
    def reserved_bytes(self) -> int:
        """Return by how much the event changes the memory that is held of the card."""
        return _RESERVES.get(self.action, 0) * self.size

    @property
    def line(self) -> str:
        """Return the innermost line of Python outside of PyTorch, as `train.py:12`; empty without one."""
        for frame in self.frames if isinstance(self.frames, (list, tuple)) else ():
            if not isinstance(frame, dict):
                continue
            name = str(frame.get("filename", "")).replace("\\", "/")
            in_library = (
                "/torch/" in name or "/autoaccum/" in name or ("/lib/python3" in name and "-packages/" not in name)
            )
            if name.endswith(".py") and not in_library:
                return f"{name}:{frame.get('line')}"
        return ""


@dataclass(frozen=True, kw_only=True)
class RecordedBlock:
    """A block at the end of the record."""

    address: int
    size: int
    state: str
    requested_size: int = 0
    frames: Any = ()

    @property
    def is_used(self) -> bool:
        """Return whether the block is allocated, or waits for another stream."""
        return self.state != "inactive"


@dataclass(frozen=True, kw_only=True)
class RecordedSegment:
    """A segment at the end of the record."""

    address: int
    total_size: int
    blocks: tuple[RecordedBlock, ...]
    device: int = 0
    stream: int = 0
    segment_pool_id: tuple[int, int] = (0, 0)
    is_expandable: bool = False


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    segments: tuple[RecordedSegment, ...]
    device_traces: tuple[tuple[Entry, ...], ...]
    allocator_settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldBefore:
    """The state of the allocator before the first event: segments and blocks.

    Attributes:
        segments: By address, the size and the stream of each.
        used: By address, the bytes that each used block was requested with.
        sizes: By address, the sizes of those that are still there at the end; the others' are not recorded.
    """

    segments: dict[int, tuple[int, int]]
    used: dict[int, int]
    sizes: dict[int, int]


@dataclass(frozen=True)
class Recording:
    """The events of one card in order, and the segments at their end.

    Attributes:
        entries: The events.
        segments: The segments.
        settings: The settings of the allocator, without a limit.
        before: The state before the first event, which follows from the end and the events.
    """

    entries: tuple[Entry, ...]
    segments: tuple[RecordedSegment, ...]
    settings: AllocatorSettings
    before: HeldBefore

    @property
    def reserved_before(self) -> int:
        """Return the memory that was held of the card before the first event."""
        changes = sum(entry.reserved_bytes for entry in self.entries)
        return sum(segment.total_size for segment in self.segments) - changes

    @property
    def overflowed(self) -> bool:
        """Return whether blocks have a call stack and no event, as when older events were dropped (`max_entries`)."""
        made = {entry.addr for entry in self.entries if entry.action == "alloc"}
        return any(block.is_used and block.frames and block.address not in made for block in _blocks(self.segments))


def read_recording(path: str | PathLike[str]) -> Recording:
    """Read a snapshot with the history of one card.

    Raises:
        UsageError: The file cannot be read, is no snapshot, or has no complete history of one card.
    """
    file = Path(path)
    try:
        plain = _PlainUnpickler(file).load()
        snapshot = read_record(plain, _Snapshot)
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror})", hint="name a snapshot") from None
    except RecordError as error:
        raise UsageError(f"{file} is no snapshot of PyTorch's allocator ({error})", hint=_HOW) from None
    cards = [card for card, entries in enumerate(snapshot.device_traces) if entries]
    if not cards:
        raise UsageError(f"{file} has no history of events", hint=_HOW)
    if len(cards) > 1:
        raise UsageError(f"{file} has events of {len(cards)} cards", hint="record a process that uses one")
    entries = snapshot.device_traces[cards[0]]
    segments = tuple(segment for segment in snapshot.segments if segment.device == cards[0])
    conf = snapshot.allocator_settings.get(_CONF)
    # The record shows the effect of a limit.
    settings = replace(read_settings({_CONF: conf} if conf else {}), memory_fraction=1.0)
    try:
        return Recording(entries, segments, settings, _rewind(entries, segments))
    except LookupError as error:
        raise UsageError(
            f"the history in {file} is not complete: {error.args[0]}", hint="record without skip_actions"
        ) from None


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, tuples and dicts; anything else has to be imported, and is refused."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb")
        super().__init__(self._file)

    def load(self) -> Any:
        try:
            with self._file:
                return super().load()
        except (UsageError, OSError):
            raise
        except Exception as error:
            why = first_line(error) or type(error).__name__
            raise UsageError(f"{self._path} is no snapshot, or only a part of one ({why})", hint=_HOW) from None

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UsageError(
            f"{self._path} is refused: it would import {module}.{name}, and a snapshot has plain containers only",
            hint="take a file that torch.cuda.memory._dump_snapshot wrote",
        )


def _blocks(segments: tuple[RecordedSegment, ...]) -> Iterator[RecordedBlock]:
    return (block for segment in segments for block in segment.blocks)


def _rewind(entries: tuple[Entry, ...], segments: tuple[RecordedSegment, ...]) -> HeldBefore:
    """Undo the events from the last to the first.

    Raises:
        LookupError: An event is missing; the text says which.
    """
    held = {segment.address: (segment.total_size, segment.stream) for segment in segments}
    used = {block.address: block.requested_size for block in _blocks(segments) if block.is_used}
    sizes = {block.address: block.size for block in _blocks(segments) if block.is_used}
    for entry in reversed(entries):
        if entry.action == "alloc":
            if used.pop(entry.addr, None) is None:
                raise LookupError(f"the block at {entry.addr:#x} is never freed, and gone at the end")
            sizes.pop(entry.addr, None)
        elif entry.action == "free_completed":
            if entry.addr in used:
                raise LookupError(f"the block at {entry.addr:#x} is freed, and used by another request at that time")
            used[entry.addr] = entry.size
        elif entry.action == "segment_alloc":
            if held.pop(entry.addr, None) is None:
                raise LookupError(f"the segment at {entry.addr:#x} is never given back, and gone at the end")
        elif entry.action == "segment_free":
            held[entry.addr] = entry.size, entry.stream
    return HeldBefore(held, used, sizes)


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
