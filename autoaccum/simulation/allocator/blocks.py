"""Blocks and block pools of PyTorch's caching allocator, and its expandable segments."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Final

_GRAIN_BITS: Final = 9
_ADDRESS_BITS: Final = 55


class Block:
    """A range of addresses in one segment, used or free (`Block` in `c10/cuda/CUDACachingAllocator.cpp`).

    Attributes:
        address: The first byte.
        mapped: False for addresses of an expandable segment that have no memory.
        segment_bytes: The size of the expandable segment that contains it, with all addresses; None for others.
        prev, next: The neighbours in the same segment.
        key: Its place among the free blocks of its pool, while it is one of them.
    """

    __slots__ = ("address", "allocated", "key", "prev", "next", "mapped", "pool", "segment_bytes", "size")

    def __init__(
        self, pool: BlockPool, address: int, size: int, *, mapped: bool = True, segment_bytes: int | None = None
    ) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.allocated, self.mapped, self.segment_bytes = False, mapped, segment_bytes
        self.key = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Return whether the block is only a part of its segment (`is_split`)."""
        return self.prev is not None or self.next is not None

    def split_at(self, size: int) -> Block:
        """Keep the first `size` bytes and return the rest as a free block that is in no pool."""
        rest = Block(
            self.pool, self.address + size, self.size - size, mapped=self.mapped, segment_bytes=self.segment_bytes
        )
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def merge_neighbours(self) -> None:
        """Merge with free neighbours of the same segment, and remove them from their pool (`try_merge_blocks`)."""
        other = self.prev
        if other is not None and not other.allocated and other.mapped == self.mapped:
            self.pool.remove(other)
            self.address, self.prev = other.address, other.prev
            self.size += other.size
            if other.prev is not None:
                other.prev.next = self
        other = self.next
        if other is not None and not other.allocated and other.mapped == self.mapped:
            self.pool.remove(other)
            self.next = other.next
            self.size += other.size
            if other.next is not None:
                other.next.prev = self


class BlockPool:
    """The free blocks of one pool, ordered by size and address, and its unmapped blocks, ordered by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._unmapped: list[int] = []

    def insert(self, block: Block) -> None:
        """Add a free block."""
        block.key = key = (block.size >> _GRAIN_BITS << _ADDRESS_BITS if block.mapped else 0) | (
            block.address >> _GRAIN_BITS
        )
        self._blocks[key] = block
        insort(self._keys if block.mapped else self._unmapped, key)

    def remove(self, block: Block) -> None:
        """Remove a free block, by the key that it had when it was added."""
        key = block.key
        del self._blocks[key]
        keys = self._keys if block.mapped else self._unmapped
        del keys[bisect_left(keys, key)]

    def take(self, size: int) -> Block | None:
        """Return the best fit, and remove it."""
        index = bisect_left(self._keys, size >> _GRAIN_BITS << _ADDRESS_BITS)
        return self._blocks.pop(self._keys.pop(index)) if index < len(self._keys) else None

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest block of at least `size` bytes; of equal ones, the one at the lowest address."""
        return next(self.blocks_from(size), None)

    def blocks_from(self, size: int) -> Iterator[Block]:
        """Yield the blocks of at least `size` bytes, the smallest first."""
        for index in range(bisect_left(self._keys, size >> _GRAIN_BITS << _ADDRESS_BITS), len(self._keys)):
            yield self._blocks[self._keys[index]]

    def free_blocks(self) -> list[Block]:
        """Return all free blocks with memory, the smallest first."""
        return [self._blocks[key] for key in self._keys]

    def unmapped_blocks(self) -> Iterator[Block]:
        """Yield the blocks without memory, the lowest address first."""
        return (self._blocks[address] for address in self._unmapped)


class ExpandableSegments:
    """The expandable segments of one pool: reserved addresses, to which memory is mapped in handles of one size.

    Rules are those of the functions named in the docstrings, in c10/cuda/CUDACachingAllocator.cpp. A segment reserves
    `address_bytes`; `reserve_addresses` returns the first of them. `cuda_malloc` and `cuda_free` count the memory of
    the card, and `cuda_malloc` returns False if there is not enough.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        handle_bytes: int,
        address_bytes: int,
        reserve_addresses: Callable[[int], int],
        cuda_malloc: Callable[[int], bool],
        cuda_free: Callable[[int], None],
    ) -> None:
        self._pool, self._handle_bytes = pool, handle_bytes
        self._address_bytes = -(-address_bytes // handle_bytes) * handle_bytes
        self._reserve_addresses, self._cuda_malloc, self._cuda_free = reserve_addresses, cuda_malloc, cuda_free

    def best_fit(self, size: int) -> Block | None:
        """Return the best fit, where a block that can grow counts with its potential size (`get_free_block`)."""
        best: Block | None = None
        for block in self._pool.blocks_from(size):
            if best is not None and _potential_bytes(block) >= _potential_bytes(best):
                break
            best = block
        return best

    def allocate(self, size: int) -> Block | None:
        """Return a free block of at least `size` bytes, at the lowest address with room; None without memory.

        `try_allocate_expandable_block`. Memory that was mapped before memory ran out stays mapped.
        """
        block = self._find_room(size)
        if not block.mapped and not self._map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None or not self._map_block(following, min(size - block.size, following.size)):
                return None
            block = following
        self._pool.remove(block)
        return block

    def release_cached(self) -> None:
        """Unmap every handle that is completely free (`release_blocks`, `unmap_block`)."""
        unmapped = [self._unmap_block(block) for block in self._pool.free_blocks() if block.segment_bytes is not None]
        for block in unmapped:
            if block is not None and not block.is_split:
                self._pool.remove(block)

    def _find_room(self, size: int) -> Block:
        for block in self._pool.unmapped_blocks():
            prev = block.prev
            first = prev if prev is not None and not prev.allocated else block
            if _has_room(first, size):
                return first
        address = self._reserve_addresses(self._address_bytes + self._handle_bytes)
        address = -(-address // self._handle_bytes) * self._handle_bytes
        segment = Block(self._pool, address, self._address_bytes, mapped=False, segment_bytes=self._address_bytes)
        self._pool.insert(segment)
        return segment

    def _map_block(self, block: Block, size: int) -> bool:
        mapped = -(-size // self._handle_bytes) * self._handle_bytes
        if not self._cuda_malloc(mapped):
            return False
        self._pool.remove(block)
        if mapped < block.size:
            self._pool.insert(block.split_at(mapped))
        block.mapped = True
        block.merge_neighbours()
        self._pool.insert(block)
        return True

    def _unmap_block(self, block: Block) -> Block | None:
        first = -(-block.address // self._handle_bytes) * self._handle_bytes
        last = (block.address + block.size) // self._handle_bytes * self._handle_bytes
        if first >= last:
            return None
        self._pool.remove(block)
        if first > block.address:
            front, block = block, block.split_at(first - block.address)
            self._pool.insert(front)
        if last < block.address + block.size:
            self._pool.insert(block.split_at(last - block.address))
        block.mapped = False
        block.merge_neighbours()
        self._pool.insert(block)
        self._cuda_free(last - first)
        return block


def _potential_bytes(block: Block) -> int:
    """Return the size of `block` with the unmapped addresses that follow it."""
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and not block.allocated:
        room += block.size
        block = block.next
    return room >= size
