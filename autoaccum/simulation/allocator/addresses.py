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
        self._gaps = [(0, _TOP)]
        self._spans: dict[int, int] = {}
        self._holes: dict[int, list[tuple[int, int]]] = {}
        self._starts: list[int] = []
        self._refused = _TOP  # No hole has room for this and more.

    def reserve(self, size: int) -> int:
        """Return the address of a new segment."""
        for start in self._starts if size < self._refused else ():
            holes = self._holes[start]
            for index, (address, free) in enumerate(holes):
                if free >= size:
                    holes[index : index + 1] = [(address + size, free - size)] if free > size else []
                    return address
        span = -(-size // _RANGE_BYTES) * _RANGE_BYTES
        self._refused = max(min(size, self._refused), span - size + 1)
        index = next(index for index in reversed(range(len(self._gaps))) if self._gaps[index][1] > span)
        below, free = self._gaps[index]
        self._gaps[index] = (below, free - span)
        start = below + free - span
        insort(self._starts, start)
        self._spans[start], self._holes[start] = span, [(start + size, span - size)] if span > size else []
        return start

    def release(self, address: int, size: int) -> None:
        """Give back the addresses of a segment."""
        start = self._starts[bisect_right(self._starts, address) - 1]
        holes, span = self._holes[start], self._spans[start]
        _add(holes, address, size)
        self._refused = _TOP
        if holes == [(start, span)]:
            self._starts.remove(start)
            del self._holes[start], self._spans[start]
            _add(self._gaps, start, span)


def _add(spans: list[tuple[int, int]], address: int, size: int) -> None:
    """Add a span of `size` bytes to free ones, and join it with its neighbours."""
    index = bisect_left(spans, (address, 0))
    if index < len(spans) and spans[index][0] == address + size:
        size += spans.pop(index)[1]
    if index and sum(spans[index - 1]) == address:
        address, before = spans[index - 1]
        spans[index - 1] = (address, before + size)
    else:
        spans.insert(index, (address, size))
