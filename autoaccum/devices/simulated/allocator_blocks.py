"""Blocks of segments, and those of a pool that are free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

_GRAIN_BITS: Final = 9
_ADDRESS_BITS: Final = 55
_ADDRESSES: Final = (1 << _ADDRESS_BITS) - 1


class Block:
    """A range of addresses in one segment, used or free (`Block` in `c10/cuda/CUDACachingAllocator.cpp`).

    Attributes:
        pool: Whose segment it is part of.
        address: Where it begins; segments are placed one behind the other, in the order they were asked for.
        size: In bytes, a multiple of 512.
        allocated: Whether it is given out.
        mapped: False for addresses of an expandable segment without memory.
        segment_bytes: Of an expandable segment: all its addresses; None of others.
        before: The block in front of it in the same segment.
        behind: The one behind it.
        since: The count of searches in its pool when it became free.
    """

    __slots__ = ("address", "allocated", "before", "behind", "mapped", "pool", "segment_bytes", "since", "size")

    def __init__(
        self, pool: Pool, address: int, size: int, *, mapped: bool = True, segment_bytes: int | None = None
    ) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.allocated, self.mapped, self.segment_bytes = False, mapped, segment_bytes
        self.before: Block | None = None
        self.behind: Block | None = None
        self.since = 0

    @property
    def split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.before is not None or self.behind is not None

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; the rest becomes a block behind, free and in no list."""
        rest = Block(
            self.pool, self.address + size, self.size - size, mapped=self.mapped, segment_bytes=self.segment_bytes
        )
        rest.before, rest.behind = self, self.behind
        if self.behind is not None:
            self.behind.before = rest
        self.behind, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Take up free neighbours of the same segment, and out of their lists (`try_merge_blocks`)."""
        other = self.before
        if other is not None and not other.allocated and other.mapped == self.mapped:
            self.pool.remove(other)
            self.address, self.before = other.address, other.before
            self.size += other.size
            if other.before is not None:
                other.before.behind = self
        other = self.behind
        if other is not None and not other.allocated and other.mapped == self.mapped:
            self.pool.remove(other)
            self.behind = other.behind
            self.size += other.size
            if other.behind is not None:
                other.behind.before = self


class Pool:
    """The free blocks of one pool by size and address, and addresses without memory by address.

    Args:
        small: Whether it is for blocks up to 1 MiB.
    """

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.searches = 0
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._unmapped: list[int] = []

    def insert(self, block: Block) -> None:
        """Note a free block."""
        address = block.address >> _GRAIN_BITS
        self._blocks[address] = block
        if block.mapped:
            block.since = self.searches
            insort(self._keys, block.size >> _GRAIN_BITS << _ADDRESS_BITS | address)
        else:
            insort(self._unmapped, address)

    def remove(self, block: Block) -> None:
        """Forget a free block."""
        address = block.address >> _GRAIN_BITS
        del self._blocks[address]
        if block.mapped:
            keys = self._keys
            del keys[bisect_left(keys, block.size >> _GRAIN_BITS << _ADDRESS_BITS | address)]
        else:
            del self._unmapped[bisect_left(self._unmapped, address)]

    def best(self, size: int) -> Block | None:
        """The smallest block that holds `size` bytes, of equal ones that with the lowest address."""
        keys = self._keys
        index = bisect_left(keys, size >> _GRAIN_BITS << _ADDRESS_BITS)
        return self._blocks[keys[index] & _ADDRESSES] if index < len(keys) else None

    def from_size(self, size: int) -> Iterator[Block]:
        """Blocks of `size` bytes and more, the smallest first."""
        for index in range(bisect_left(self._keys, size >> _GRAIN_BITS << _ADDRESS_BITS), len(self._keys)):
            yield self._blocks[self._keys[index] & _ADDRESSES]

    def free(self) -> list[Block]:
        """All free blocks with memory, the smallest first."""
        return [self._blocks[key & _ADDRESSES] for key in self._keys]

    def unmapped(self) -> Iterator[Block]:
        """Addresses without memory, the lowest first."""
        return (self._blocks[address] for address in self._unmapped)
