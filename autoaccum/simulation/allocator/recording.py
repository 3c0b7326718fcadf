"""Snapshots that `torch.cuda.memory._dump_snapshot` wrote, read without running anything in them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from autoaccum.errors import UsageError, first_line
from autoaccum.serialization import RecordError, read_record
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings, read_settings

_CONF = "PYTORCH_CUDA_ALLOC_CONF"
_HOW = "call torch.cuda.memory._record_memory_history() before the updates and _dump_snapshot(...) behind one"
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One event: `addr`, and `size` as it was requested; `frames` is the call stack, the innermost frame first."""

    action: str
    size: int = 0
    addr: int = 0
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

    total_size: int
    blocks: tuple[RecordedBlock, ...]
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    segments: tuple[RecordedSegment, ...]
    device_traces: tuple[tuple[Entry, ...], ...]
    allocator_settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """The events of one card in order, and the segments at their end.

    Attributes:
        entries: The events.
        segments: The segments.
        settings: The settings of the allocator.
        before: By address, the bytes requested for each block that was there before the first event, as follows from
            the end and the events.
    """

    entries: tuple[Entry, ...]
    segments: tuple[RecordedSegment, ...]
    settings: AllocatorSettings
    before: Mapping[int, int]

    @property
    def reserved_before(self) -> int:
        """Return the memory that was held of the card before the first event."""
        changes = sum(entry.reserved_bytes for entry in self.entries)
        return sum(segment.total_size for segment in self.segments) - changes

    @property
    def overflowed(self) -> bool:
        """Return whether blocks have a call stack and no event, as when older events were dropped (`max_entries`)."""
        allocated = {entry.addr for entry in self.entries if entry.action == "alloc"}
        return any(
            block.is_used and block.frames and block.address not in allocated for block in _blocks(self.segments)
        )


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
    settings = read_settings({_CONF: conf} if conf else {})
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


def _rewind(entries: tuple[Entry, ...], segments: tuple[RecordedSegment, ...]) -> dict[int, int]:
    """Undo the events from the last to the first; return the blocks before them (`Recording.before`).

    Raises:
        LookupError: An event is missing; the text says which.
    """
    used = {block.address: block.requested_size for block in _blocks(segments) if block.is_used}
    for entry in reversed(entries):
        if entry.action == "alloc":
            if used.pop(entry.addr, None) is None:
                raise LookupError(f"the block at {entry.addr:#x} is never freed, and gone at the end")
        elif entry.action == "free_completed":
            if entry.addr in used:
                raise LookupError(f"the block at {entry.addr:#x} is freed, and used by another request at that time")
            used[entry.addr] = entry.size
    return used
