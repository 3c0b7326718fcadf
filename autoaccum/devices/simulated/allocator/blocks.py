"""Blocks of memory as PyTorch's caching allocator keeps them, and segments that grow by handles."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Final

_GRAIN_BITS: Final = 9
_ADDRESS_BITS: Final = 55
_ADDRESSES: Final = (1 << _ADDRESS_BITS) - 1


class Block:
    """A range of addresses in one segment, used or free (`Block` in `c10/cuda/CUDACachingAllocator.cpp`).

    Attributes:
        address: Where it begins; segments are placed one behind the other, in the order they were asked for.
        mapped: False for addresses of an expandable segment without memory.
        segment_bytes: Of an expandable segment: all its addresses; None of others.
        before, behind: Its neighbours in the same segment.
    """

    __slots__ = ("address", "allocated", "before", "behind", "mapped", "pool", "segment_bytes", "size")

    def __init__(
        self, pool: BlockPool, address: int, size: int, *, mapped: bool = True, segment_bytes: int | None = None
    ) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.allocated, self.mapped, self.segment_bytes = False, mapped, segment_bytes
        self.before: Block | None = None
        self.behind: Block | None = None

    @property
    def split(self) -> bool:
        """Return whether it is only a part of its segment."""
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


class BlockPool:
    """The free blocks of one pool by size and address, and addresses without memory by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._unmapped: list[int] = []

    def insert(self, block: Block) -> None:
        """Note a free block."""
        address = block.address >> _GRAIN_BITS
        self._blocks[address] = block
        if block.mapped:
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


Take = Callable[[int], bool]
"""Asks for bytes of the card, and tells whether there were so many."""


class ExpandableSegments:
    """Memory of a pool in handles of one size, mapped to addresses that were set aside.

    A rule's source is the function of a like name in `c10/cuda/CUDACachingAllocator.cpp`. A segment sets aside
    `address_bytes`, and `place` tells where the next one begins; `take` and `give` ask the card.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        handle_bytes: int,
        address_bytes: int,
        place: Callable[[int], int],
        take: Take,
        give: Callable[[int], None],
    ) -> None:
        self._pool, self._handle_bytes = pool, handle_bytes
        self._address_bytes = -(-address_bytes // handle_bytes) * handle_bytes
        self._place, self._take, self._give = place, take, give

    def best(self, size: int) -> Block | None:
        """The best fit, where a block that can grow counts as large as it may become (`get_free_block`)."""
        best: Block | None = None
        for block in self._pool.from_size(size):
            if best is not None and _may_become(block) >= _may_become(best):
                break
            best = block
        return best

    def grow(self, size: int) -> Block | None:
        """A free block of at least `size` bytes at the lowest address that has room (`try_allocate_expandable_block`).

        What was mapped before memory ran out stays so.
        """
        block = self._find(size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.behind
            if behind is None or not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind
        self._pool.remove(block)
        return block

    def release(self) -> None:
        """Unmap every handle that is wholly free (`release_blocks`, `unmap_block`)."""
        unmapped = [self._unmap(block) for block in self._pool.free() if block.segment_bytes is not None]
        for block in unmapped:
            if block is not None and not block.split:
                self._pool.remove(block)

    def _find(self, size: int) -> Block:
        for block in self._pool.unmapped():
            before = block.before
            first = before if before is not None and not before.allocated else block
            if _has_room(first, size):
                return first
        address = self._place(self._address_bytes + self._handle_bytes)
        address = -(-address // self._handle_bytes) * self._handle_bytes
        segment = Block(self._pool, address, self._address_bytes, mapped=False, segment_bytes=self._address_bytes)
        self._pool.insert(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        mapped = -(-size // self._handle_bytes) * self._handle_bytes
        if not self._take(mapped):
            return False
        self._pool.remove(block)
        if mapped < block.size:
            self._pool.insert(block.cut(mapped))
        block.mapped = True
        block.merge()
        self._pool.insert(block)
        return True

    def _unmap(self, block: Block) -> Block | None:
        first = -(-block.address // self._handle_bytes) * self._handle_bytes
        last = (block.address + block.size) // self._handle_bytes * self._handle_bytes
        if first >= last:
            return None
        self._pool.remove(block)
        if first > block.address:
            front, block = block, block.cut(first - block.address)
            self._pool.insert(front)
        if last < block.address + block.size:
            self._pool.insert(block.cut(last - block.address))
        block.mapped = False
        block.merge()
        self._pool.insert(block)
        self._give(last - first)
        return block


def _may_become(block: Block) -> int:
    """Its size with the addresses behind it that have no memory yet."""
    behind = block.behind
    return block.size if behind is None or behind.mapped else block.size + behind.size


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and not block.allocated:
        room += block.size
        block = block.behind
    return room >= size
