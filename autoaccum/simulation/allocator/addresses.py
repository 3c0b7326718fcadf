"""Addresses of segments: the order in which CUDA lays them out, by which PyTorch chooses among equal free blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Final

from autoaccum.units import MIB

_RANGE_BYTES: Final = 32 * MIB
_TOP: Final = 1 << 60


class SegmentAddresses:
    """The addresses that NVIDIA's driver on Linux gives to segments.

    It reserves addresses in ranges of whole 32 MiB. A segment lies at the lowest address with room in these ranges. If
    there is none, a range is reserved for it at the top of the highest gap that is larger, as `mmap` does: each below
    the ones before. An empty range is given back.

    Source: not published. All 86 addresses that an H100 under driver 580 gave, over frees too, are as it says
    (tests/simulation/allocator/test_addresses.py), and the 58 segments that filled ranges in a snapshot that others
    published (cranberrii/ftcourse on GitHub). Not modelled: a process maps host memory and libraries into the same
    addresses, which takes gaps and leaves others.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._used_bytes: dict[int, int] = {}
        self._holes: list[tuple[int, int]] = []
        self._largest_hole = 0
        self._gaps = [(0, _TOP)]

    def reserve(self, size: int) -> int:
        """Return the address of a new segment."""
        address = self._take_hole(size)
        return self._add_range(size) if address is None else address

    def release(self, address: int, size: int) -> None:
        """Give back the addresses of a segment."""
        index = bisect_right(self._starts, address) - 1
        start = self._starts[index]
        self._used_bytes[start] -= size
        if self._used_bytes[start]:
            _add(self._holes, address, size, start, self._ends[start])
            self._largest_hole = _TOP
            return
        end = self._ends.pop(start)
        del self._starts[index], self._used_bytes[start]
        del self._holes[bisect_left(self._holes, (start, 0)) : bisect_left(self._holes, (end, 0))]
        _add(self._gaps, start, end - start, 0, _TOP)

    def _take_hole(self, size: int) -> int | None:
        if size > self._largest_hole:
            return None
        for index, (address, free) in enumerate(self._holes):
            if free >= size:
                if free > size:
                    self._holes[index] = (address + size, free - size)
                else:
                    del self._holes[index]
                self._used_bytes[self._starts[bisect_right(self._starts, address) - 1]] += size
                return address
        self._largest_hole = size - 1
        return None

    def _add_range(self, size: int) -> int:
        span = -(-size // _RANGE_BYTES) * _RANGE_BYTES
        index = next(index for index in reversed(range(len(self._gaps))) if self._gaps[index][1] > span)
        below, free = self._gaps[index]
        address = below + free - span
        self._gaps[index] = (below, free - span)
        insort(self._starts, address)
        self._ends[address], self._used_bytes[address] = address + span, size
        if span > size:
            insort(self._holes, (address + size, span - size))
            self._largest_hole = max(self._largest_hole, span - size)
        return address


def _add(spans: list[tuple[int, int]], address: int, size: int, low: int, high: int) -> None:
    """Add a span of `size` bytes to free ones, and join it with neighbours between `low` and `high`."""
    index = bisect_left(spans, (address, 0))
    if index < len(spans) and spans[index][0] == address + size < high:
        size += spans.pop(index)[1]
    if index and sum(spans[index - 1]) == address > low:
        address, before = spans[index - 1]
        spans[index - 1] = (address, before + size)
    else:
        spans.insert(index, (address, size))
