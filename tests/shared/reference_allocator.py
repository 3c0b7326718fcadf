"""A second, slow model of PyTorch's allocator: each segment is a list of cells, each search scans all of them.

It shares no code and no structure with `simulated.allocator.caching_allocator`: it has no links between blocks, no
sorted lists, and no addresses except the order in which segments were created.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from autoaccum.simulation.allocator.settings import AllocatorSettings

MIB = 1 << 20


@dataclass
class Cell:
    size: int
    state: str  # "free", "unmapped", or the number of a block in use


@dataclass
class Segment:
    small: bool
    number: int
    cells: list[Cell] = field(default_factory=list)

    def merge_neighbours(self) -> None:
        """Merge neighbours that are both free or both unmapped."""
        joined = []
        for state, group in groupby(self.cells, key=lambda cell: cell.state):
            cells = list(group)
            if len(cells) == 1:
                joined += cells
            else:
                joined.append(Cell(sum(cell.size for cell in cells), state))
        self.cells = joined


class ReferenceOutOfMemoryError(Exception):
    pass


class ReferenceAllocator:
    def __init__(self, capacity: int | None, settings: AllocatorSettings) -> None:
        self.settings, self.capacity = settings, capacity
        self.segments: list[Segment] = []
        self.created = self.peak_reserved = self.peak_allocated = self.retries = self.releases = 0

    @property
    def reserved(self) -> int:
        return sum(cell.size for segment in self.segments for cell in segment.cells if cell.state != "unmapped")

    @property
    def allocated(self) -> int:
        return sum(cell.size for segment in self.segments for cell in segment.cells if cell.state.isdigit())

    def round(self, size: int) -> int:
        size = max(size, 512)
        power = 1
        while power * 2 <= size:
            power *= 2
        divisions = self.settings.roundup_divisions
        step = power // divisions if divisions > 1 and size > 512 * divisions else 512
        while size % step:
            size += step - size % step
        return size

    def malloc(self, block: int, requested: int) -> None:
        size = self.round(requested)
        small = size <= MIB
        place = self.best(small, size) or self.allocate_or_release(small, size)
        if place is None:
            raise ReferenceOutOfMemoryError
        segment, cell = place
        rest = cell.size - size
        splits = rest >= 512 if small or self.settings.expandable_segments else rest > MIB and not self.oversize(size)
        if splits:
            cell.size = size
            segment.cells.insert(segment.cells.index(cell) + 1, Cell(rest, "free"))
        cell.state = str(block)
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, block: int) -> None:
        for segment in self.segments:
            for cell in segment.cells:
                if cell.state == str(block):
                    cell.state = "free"
                    segment.merge_neighbours()
                    return

    def oversize(self, size: int) -> bool:
        return self.settings.max_split_bytes is not None and size >= self.settings.max_split_bytes

    def fitting(self, small: bool, size: int) -> list[tuple[Segment, Cell]]:
        found: list[Any] = [
            (cell.size, segment.number, index, segment, cell)
            for segment in self.segments
            if segment.small == small
            for index, cell in enumerate(segment.cells)
            if cell.state == "free" and cell.size >= size
        ]
        return [(entry[3], entry[4]) for entry in sorted(found, key=lambda entry: entry[:3])]

    def best(self, small: bool, size: int) -> tuple[Segment, Cell] | None:
        fitting = self.fitting(small, size)
        if not fitting:
            return None
        chosen = fitting[0]
        if self.settings.expandable_segments:
            for candidate in fitting[1:]:
                if self.potential_bytes(*candidate) >= self.potential_bytes(*chosen):
                    break
                chosen = candidate
        held = chosen[1].size
        if self.oversize(held) and not self.oversize(size):
            return None
        if self.oversize(size) and held >= size + 20 * MIB:
            return None
        return chosen

    def potential_bytes(self, segment: Segment, cell: Cell) -> int:
        after = segment.cells[segment.cells.index(cell) + 1 :]
        return cell.size + (after[0].size if after and after[0].state == "unmapped" else 0)

    def allocate_or_release(self, small: bool, size: int) -> tuple[Segment, Cell] | None:
        found = self.grow(small, size)
        if found is None and self.release_some(small, size):
            found = self.grow(small, size)
        if found is None:
            self.release_all()
            self.retries += 1
            found = self.grow(small, size)
        return found

    def segment_size(self, size: int) -> int:
        if size <= MIB:
            return 2 * MIB
        if size < 10 * MIB:
            return 20 * MIB
        return (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB

    def room(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity

    def grow(self, small: bool, size: int) -> tuple[Segment, Cell] | None:
        segment_size, allowed = self.segment_size(size), self.settings.allowed_bytes
        if allowed is not None and self.reserved + segment_size > allowed:
            return None
        if self.settings.expandable_segments:
            return self.expand(small, size)
        if not self.room(segment_size):
            return None
        segment = self.new_segment(small, Cell(segment_size, "free"))
        return segment, segment.cells[0]

    def new_segment(self, small: bool, cell: Cell) -> Segment:
        self.segments.append(Segment(small, self.created, [cell]))
        self.created += 1
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self.segments[-1]

    def expand(self, small: bool, size: int) -> tuple[Segment, Cell] | None:
        handle = 2 * MIB if small else 20 * MIB
        segment, index = self.lowest_room(small, size, handle)
        while True:
            cell = segment.cells[index]
            if cell.state == "free" and cell.size >= size:
                return segment, cell
            bare = index + (cell.state == "free")
            wanted = min(size - (cell.size if cell.state == "free" else 0), segment.cells[bare].size)
            mapped = (wanted + handle - 1) // handle * handle
            if not self.room(mapped):
                return None
            rest = segment.cells[bare].size - mapped
            segment.cells[bare : bare + 1] = [Cell(mapped, "free")] + [Cell(rest, "unmapped")] * bool(rest)
            segment.merge_neighbours()
            self.peak_reserved = max(self.peak_reserved, self.reserved)

    def lowest_room(self, small: bool, size: int, handle: int) -> tuple[Segment, int]:
        for segment in self.segments:
            states = [cell.state for cell in segment.cells]
            for index, state in enumerate(states):
                if segment.small != small or state != "unmapped":
                    continue
                first = index - 1 if index and states[index - 1] == "free" else index
                room = 0
                for cell in segment.cells[first:]:
                    if cell.state.isdigit():
                        break
                    room += cell.size
                if room >= size:
                    return segment, first
        total = self.settings.total_bytes
        addresses = 1 << 45 if total is None else total + total // 8
        return self.new_segment(small, Cell((addresses + handle - 1) // handle * handle, "unmapped")), 0

    def release_some(self, small: bool, size: int) -> bool:
        limit = self.settings.max_split_bytes
        if limit is None or self.settings.expandable_segments:
            return False
        wanted, released = max(size, limit), 0
        large_enough = self.fitting(small, wanted)
        if large_enough:
            self.drop(large_enough[0][0])
            return True
        for segment, cell in reversed(self.fitting(small, limit)):
            if released < wanted:
                released += cell.size
                self.drop(segment)
        return released >= wanted

    def release_all(self) -> None:
        for segment in list(self.segments):
            if not self.settings.expandable_segments:
                if [cell.state for cell in segment.cells] == ["free"]:
                    self.drop(segment)
                continue
            handle = 2 * MIB if segment.small else 20 * MIB
            cells, start, gave = [], 0, False
            for cell in segment.cells:
                end = start + cell.size
                first, last = (start + handle - 1) // handle * handle, end // handle * handle
                if cell.state == "free" and last > first:
                    gave = True
                    pieces = [(first - start, "free"), (last - first, "unmapped"), (end - last, "free")]
                    cells += [Cell(size, state) for size, state in pieces if size]
                else:
                    cells.append(cell)
                start = end
            segment.cells = cells
            segment.merge_neighbours()
            if gave and [cell.state for cell in segment.cells] == ["unmapped"]:
                self.segments.remove(segment)

    def drop(self, segment: Segment) -> None:
        self.releases += 1
        self.segments.remove(segment)
